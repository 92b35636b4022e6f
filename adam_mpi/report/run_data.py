"""Read a run for the report: its summary, its metrics over time, its configuration."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint.run_directory import read_metrics
from adam_mpi.config import Config, load


@dataclass(frozen=True)
class Run:
    """One run of the report."""

    name: str
    path: Path
    config: Config
    summary: dict[str, Any]
    metrics: list[dict[str, Any]]

    def lines(self, part: str = "train", done: bool = False) -> list[dict[str, Any]]:
        """Return the metrics of one part of the data; if `done`, only those at the ends of phases."""
        return [line for line in self.metrics if line["part"] == part and (line["done"] or not done)]

    @property
    def strips(self) -> dict[str, str]:
        """Rank of each worker -> "replica.strip"; empty where the job has left no status."""
        file = self.path / "status.json"
        rows = json.loads(file.read_text())["ranks"] if file.exists() else []
        return {str(row["rank"]): f"{row['replica']}.{row['strip']}" for row in rows if row["role"] == "worker"}


def read(path: Path, name: str) -> Run:
    """Return the run in a directory, under `name`; raise UserError if it has not finished an epoch."""
    summary = path / "summary.json"
    for file in (path / "config.toml", summary, path / "metrics.jsonl"):
        if not file.exists():
            raise UserError(f"{path}: no {file.name}; give the directory of a run that has finished an epoch")
    return Run(name, path, load(path / "config.toml"), json.loads(summary.read_text()), read_metrics(path))
