"""The figures of a run over time: a line of `metrics.jsonl` each, and event files for TensorBoard where wanted."""

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from adam_mpi.errors import UserError


def check() -> None:
    """Before a job starts that is to write event files."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise UserError("observe.tensorboard = true: tensorboardX is missing; pip install 'adam-mpi[tensorboard]'")


class Metrics:
    def __init__(self, directory: Path, tensorboard: bool) -> None:
        self.path = directory / "metrics.jsonl"
        self.events = None
        if tensorboard:
            from tensorboardX import SummaryWriter

            self.events = SummaryWriter(str(directory / "tensorboard"))

    def write(self, line: dict[str, Any], step: int) -> None:
        """`step`: images trained on so far, the axis of TensorBoard's plots."""
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        if self.events is not None:
            self._write_events(line, step)

    def _write_events(self, line: dict[str, Any], step: int) -> None:
        assert self.events is not None
        part, done = line["part"], line["done"]
        for name, value in scalars(line):
            # Loss and accuracy mean something else in each part of the data; of held-out ones only whole passes do.
            if name in ("loss", "accuracy") and (part == "train" or done):
                self.events.add_scalar(f"{name}/{part}", value, step)
            elif name not in ("loss", "accuracy") and part == "train":
                self.events.add_scalar(name, value, step)
        if line["staleness_histogram"]:
            self.events.add_histogram_raw("staleness_histogram", global_step=step, **_raw(line))
        self.events.flush()

    def close(self) -> None:
        if self.events is not None:
            self.events.close()


def scalars(line: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a line by name, those of nested ones as "busy/worker". Pure."""
    for name, value in line.items():
        if isinstance(value, dict) and name != "staleness_histogram":
            yield from scalars(value, f"{prefix}{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield prefix + name, value


def _raw(line: dict[str, Any]) -> dict[str, Any]:
    """The histogram of staleness as TensorBoard takes it: a bucket up to half a clock above each value."""
    pairs = sorted((int(value), count) for value, count in line["staleness_histogram"].items())
    values, counts = [value for value, _ in pairs], [count for _, count in pairs]
    return {
        "min": values[0], "max": values[-1], "num": sum(counts),
        "sum": sum(v * c for v, c in pairs), "sum_squares": sum(v * v * c for v, c in pairs),
        "bucket_limits": [value + 0.5 for value in values], "bucket_counts": counts,
    }  # fmt: skip
