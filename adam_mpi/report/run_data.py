"""The data of the report about a run: its summary, metrics and configuration, and an evaluation of its test images."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint.run_directory import read_metrics
from adam_mpi.config import Config, load
from adam_mpi.data.sets import open_set
from adam_mpi.inference.trained import Trained
from adam_mpi.model.metrics import CLASSES, Monitor, count_confusions, read_monitor


@dataclass(frozen=True)
class Run:
    """One run of the report."""

    name: str
    path: Path
    config: Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def lines(self, part: str = "train", done: bool = False) -> list[dict[str, Any]]:
        """Return the metrics of one part of the data of a reported run; if `done`, only at the ends of phases."""
        return [line for line in self.metrics if line["part"] == part and (line["done"] or not done)]

    @property
    def monitor(self) -> Monitor:
        """Return the monitored figure of the reported run."""
        return read_monitor(self.summary)

    @property
    def strips(self) -> dict[str, str]:
        """Return the strip of each worker of the reported run, rank -> "replica.strip"; empty without a status."""
        file = self.path / "status.json"
        rows = json.loads(file.read_text())["ranks"] if file.exists() else []
        return {str(row["rank"]): f"{row['replica']}.{row['strip']}" for row in rows if row["role"] == "worker"}


def read_run(path: Path, name: str) -> Run:
    """Return the data of the run to report in a directory, under `name`; raise UserError without an epoch."""
    summary = path / "summary.json"
    for file in (path / "config.toml", summary, path / "metrics.jsonl"):
        if not file.exists():
            raise UserError(f"{path}: no {file.name}; give the directory of a run that has finished an epoch")
    return Run(name, path, load(path / "config.toml"), json.loads(summary.read_text()), read_metrics(path))


BLOCK = 1024
"""Images that are evaluated at once."""


@dataclass(frozen=True)
class Evaluated:
    """The confusion matrix, and the images whose class has the least probability."""

    confusion: np.ndarray
    """[class, predicted class] -> images."""
    images: np.ndarray
    """The worst images, (count, channels, rows, columns)."""
    labels: np.ndarray
    """The class of each of them."""
    predicted: np.ndarray
    """The predicted class of each of them."""
    probabilities: np.ndarray
    """The probability that the network gives to the class of each of them."""


def evaluate_run(model: Trained, worst: int) -> Evaluated:
    """Evaluate `model` on test images for the report, and keep the `worst`; raise UserError without data."""
    data = open_set(model.config.data)
    if data.target.kind != CLASSES:
        raise UserError(f"targets are {data.target.kind}, not classes")
    confusion = np.zeros((model.inputs.classes,) * 2, np.int64)
    kept: list[tuple[float, int, int, np.ndarray]] = []
    for first in range(0, data.description.test, BLOCK):
        _, images, labels = data.read_usable("test", np.arange(first, min(first + BLOCK, data.description.test)))
        probabilities = model.predict(images)
        predicted = probabilities.argmax(axis=1)
        own = probabilities[np.arange(len(labels)), labels]
        count_confusions(probabilities, labels, confusion)
        found = [(float(own[i]), int(labels[i]), int(predicted[i]), images[i]) for i in np.argsort(own)[:worst]]
        kept = sorted([*kept, *found], key=lambda one: one[0])[:worst]
    return Evaluated(
        confusion=confusion,
        images=np.array([image for *_, image in kept]),
        labels=np.array([label for _, label, _, _ in kept]),
        predicted=np.array([prediction for _, _, prediction, _ in kept]),
        probabilities=np.array([probability for probability, *_ in kept]),
    )
