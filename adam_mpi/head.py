"""The head: the first data rank moves the job from phase to phase, hears from everybody, and writes what people see."""

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

from adam_mpi import config
from adam_mpi.cluster.post import Post
from adam_mpi.cluster.world import World
from adam_mpi.data.course import Course, Phase
from adam_mpi.data.serving import DataServer
from adam_mpi.errors import RankFailure
from adam_mpi.model import parameters
from adam_mpi.model.layers import LayerShape
from adam_mpi.observe.board import Board
from adam_mpi.observe.progress import Progress
from adam_mpi.observe.provenance import provenance
from adam_mpi.observe.rundir import newest_snapshot, snapshot_name, write_json
from adam_mpi.server import store

log = logging.getLogger(__name__)


class Head:
    def __init__(
        self, world: World, data: DataServer, post: Post, directory: Path, shapes: tuple[LayerShape, ...], epochs: int
    ) -> None:
        self.world, self.config, self.data, self.post, self.directory = world, world.config, data, post, directory
        self.shapes, self.board = shapes, Board()
        self.course = Course(self.config.train, data.count("validation") > 0, epochs)
        self.progress = Progress(self.config.train.epochs)
        self.began = self.shown = self.phase_began = now = time.monotonic()
        self.heard = dict.fromkeys((place.rank for place in world.layout.places if place.roles), now)
        self.stored: dict[str, set[int]] = {}
        self.results: dict[str, Any] = {"epochs": epochs, "images": 0, "images_skipped": 0, "train_loss": None}
        self.train_seconds = 0.0
        self.provenance = provenance(world.hosts, self.config.run.seed)
        self.closed = self.finishing = self.finished = False
        self._clear_broken_snapshots()
        self._begin(self.course.phase)

    def step(self) -> bool:
        self._check_silence()
        phase = self.course.phase
        if phase is None:
            return self._finish()
        if self._phase_done(phase):
            self._end_phase(phase)
            return True
        if not self.closed and phase.training and self._quorum(phase):
            self.closed = True
            self._tell_data({"kind": "phase", "close": True})
        if time.monotonic() - self.shown >= self.config.observe.interval:
            self._show(phase)
        return False

    def hear(self, source: int, message: dict[str, Any]) -> None:
        self.heard[source] = time.monotonic()
        if message["kind"] == "stats":
            self.board.hear(source, message)
        else:
            self.stored[message["snapshot"]].add(source)
            self._seal(message["snapshot"])

    def _begin(self, phase: Phase | None) -> None:
        order = {"kind": "phase", "phase": None if phase is None else [phase.number, phase.part, phase.epoch]}
        self._tell_data(order)
        self.closed = False
        self.phase_began = self.shown = time.monotonic()
        if phase is not None:
            log.info("phase %d: %s, epoch %d", phase.number, phase.part, phase.epoch)
            self.progress.begin(phase, self.data.count(phase.part))

    def _tell_data(self, message: dict[str, Any]) -> None:
        for rank in self.world.layout.data:
            self.post.send(message, rank)

    def _quorum(self, phase: Phase) -> bool:
        """Whether enough replicas are done with their shares to end an epoch, but not all."""
        owed = self.board.owed(phase, len(self.world.layout.data))
        return owed.count(0) < len(owed) <= owed.count(0) / self.config.epoch.quorum

    def _phase_done(self, phase: Phase) -> bool:
        shares = self.board.shares(phase)
        counted = len(shares) == len(self.world.layout.data) and all(share["done"] for share in shares)
        # A snapshot is of one moment: no server may see the next epoch's pushes before it has written this one's.
        return counted and all(self._whole(name) for name in self.stored)

    def _end_phase(self, phase: Phase) -> None:
        seconds = time.monotonic() - self.phase_began
        figures = self.board.figures(phase, seconds)
        self.progress.end(phase, int(figures["images"]), _words(figures))
        self._write_metrics(phase, figures, done=True)
        if phase.training:
            self.train_seconds += seconds
            self.results |= {"epochs": phase.epoch, "train_loss": figures["loss"]}
            self.results["images"] += figures["images"]
            self.results["images_skipped"] += figures["images_skipped"]
            self._order_snapshot(phase.epoch, final=False)
        else:
            self.results |= {f"{phase.part}_accuracy": figures["accuracy"], f"{phase.part}_loss": figures["loss"]}
        self._write_summary("running")
        self._begin(self.course.advance(figures["accuracy"]))

    def _finish(self) -> bool:
        """Workers have stopped: let the servers write and end, then put the results together."""
        layout = self.world.layout
        if self.finished or self.board.finals("worker") < len(layout.workers):
            return False
        if not self.finishing:
            self.finishing = True
            self._order_snapshot(self.results["epochs"], final=True)
            return True
        if self.board.finals("server") < len(layout.servers):
            return False
        self._write_weights()
        self._write_summary("done")
        (self.directory / "DONE").touch()
        self._say_result()
        for place in layout.places:
            self.post.send({"kind": "over"}, place.rank)
        self.finished = True
        return True

    def _say_result(self) -> None:
        accuracy = self.results["test_accuracy"]
        rate = self.results["images"] / max(self.train_seconds, 1e-9)
        seconds = time.monotonic() - self.began
        self.progress.say(f"test accuracy {accuracy:.2%} after {seconds:.1f} s, {rate:.0f} images/s in training")
        self.progress.say(f"summary: {self.directory / 'summary.json'}")

    def _order_snapshot(self, epoch: int, final: bool) -> None:
        name = snapshot_name(epoch)
        self.stored.setdefault(name, set())
        for rank in self.world.layout.servers:
            self.post.send({"kind": "store", "snapshot": name, "final": final}, rank)

    def _whole(self, name: str) -> bool:
        return self.stored[name] == set(self.world.layout.servers)

    def _seal(self, name: str) -> None:
        """Mark a snapshot that every server has written."""
        if self._whole(name):
            write_json(self.directory / "snapshots" / name / "whole.json", {"epoch": self.results["epochs"]})

    def _clear_broken_snapshots(self) -> None:
        for directory in (self.directory / "snapshots").glob("*"):
            if not (directory / "whole.json").exists():
                shutil.rmtree(directory)

    def _write_weights(self) -> None:
        newest = newest_snapshot(self.directory)
        assert newest is not None, "the servers have just written one"
        state = store.read(newest[0], parameters.total(self.shapes))
        weights = state["average" if self.config.optimiser.average else "weights"]
        tensors = parameters.tensors(self.shapes)
        store.write_weights(self.directory / "weights.h5", weights, tensors, config.to_toml(self.config))

    def _check_silence(self) -> None:
        limit = self.config.cluster.seconds
        for rank, heard in self.heard.items():
            if time.monotonic() - heard > limit:
                raise RankFailure(f"{self.world.layout.places[rank]} has not been heard of for {limit:g} s")

    def _show(self, phase: Phase) -> None:
        self.shown = time.monotonic()
        figures = self.board.figures(phase, self.shown - self.phase_began)
        share = figures["images"] / max(self.data.count(phase.part), 1)
        self.progress.update(phase, int(figures["images"]), share, _words(figures))
        self._write_metrics(phase, figures, done=False)

    def _write_metrics(self, phase: Phase, figures: dict[str, float], done: bool) -> None:
        seconds = round(time.monotonic() - self.began, 3)
        line = {"seconds": seconds, "phase": phase.number, "part": phase.part, "epoch": phase.epoch, "done": done}
        with (self.directory / "metrics.jsonl").open("a") as file:
            file.write(json.dumps(line | figures) + "\n")

    def _write_summary(self, status: str) -> None:
        layout = self.world.layout
        ranks = {"data": len(layout.data), "worker": len(layout.workers), "server": len(layout.servers)}
        summary = {
            "status": status,
            "stopped_by": self.course.reason,
            **self.results,
            "images_bad": self.board.bad(),
            "seconds": round(time.monotonic() - self.began, 3),
            "images_per_second": round(self.results["images"] / max(self.train_seconds, 1e-9), 1),
            "generation": self.world.generation,
            "ranks": ranks | {"total": len(layout.places), "replicas": layout.replicas},
            "pushes": self.board.pushes(),
            "pulls": self.board.pulls(),
            "workers": self.board.workers(),
            "cpu_seconds": self.board.cpu(),
            "staleness": self.board.distribution("leads") | {"clock_wait": self.board.clock_wait()},
            "delay": self.board.distribution("delays"),
            "recoveries": [],
            "provenance": self.provenance,
        }
        # Once a failure is told, the summary says why the job ends.
        if not (self.directory / "log" / "failure.txt").exists():
            write_json(self.directory / "summary.json", summary)


def _words(figures: dict[str, float]) -> dict[str, str]:
    return {
        "loss": f"{figures['loss']:.4f}",
        "accuracy": f"{figures['accuracy']:.4f}",
        "images/s": f"{figures['images_per_second']:.0f}",
        "staleness": f"{figures['staleness']:.2f}",
    }
