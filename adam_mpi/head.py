"""The head: the first data rank moves the job from phase to phase, hears from everybody, and writes what people see."""

import logging
import time
from typing import Any

from adam_mpi.cluster import fence
from adam_mpi.cluster.post import Post
from adam_mpi.cluster.world import World
from adam_mpi.data.course import Course, Phase
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.serving import DataServer
from adam_mpi.durable.keeper import LOOK_SECONDS, Keeper
from adam_mpi.errors import LostState, RankFailure
from adam_mpi.job import Job
from adam_mpi.observe import status
from adam_mpi.observe.board import Board
from adam_mpi.observe.hunter import describe
from adam_mpi.observe.metrics import Metrics
from adam_mpi.observe.progress import Progress
from adam_mpi.observe.provenance import provenance
from adam_mpi.observe.rundir import COMPARE, GROW, write_json
from adam_mpi.server.shelves import Shelves
from adam_mpi.settlement import Settlement, earliest

FENCE_SECONDS = 1.0
log = logging.getLogger(__name__)


class Head:
    def __init__(
        self, world: World, data: DataServer, post: Post, job: Job, shelves: Shelves,
        settled: Settlement | None = None, before: "Head | None" = None,
    ) -> None:  # fmt: skip
        """`settled`: what came out of the generation before; `before`: its head, if that was here."""
        self.world, self.config, self.data, self.post, self.directory = world, world.config, data, post, job.directory
        self.board: Board = before.board if before else Board()
        resume = job.resume
        epochs, best, midway = (resume.epochs, resume.best, resume.midway) if resume else (0, (-1.0, 0), False)
        self.course = Course(self.config.train, data.count("validation") > 0, epochs, best, midway)
        self.progress = Progress(self.config.train.epochs)
        self.metrics = Metrics(job.directory, self.config.observe.tensorboard)
        self.began = self.shown = self.phase_began = now = time.monotonic()
        self.heard = dict.fromkeys((place.rank for place in world.layout.places if place.roles), now)
        self.members = [place.member for place in world.layout.places]
        self.began_at, self.number = time.time(), 0
        self.recoveries: list[dict[str, Any]] = []
        self.stepped = now
        self.looked, self.compared = 0.0, dict[int, dict[str, Any]]()
        self.missing = len(world.gone) if self.config.recover.respawn else 0
        """Ranks that are to be started in place of those that were lost."""
        self.results: dict[str, Any] = {"epochs": epochs, "images": 0, "images_skipped": 0, "train_loss": None}
        self.train_seconds, self.trained_before = 0.0, resume.images if resume else 0
        self.troubled = False
        self.provenance = provenance(world.hosts, self.config.run.seed)
        self.closed = self.finishing = self.finished = False
        self.resumed, self.stopped_by = resume.note if resume else "", ""
        self.kernels = job.kernels
        self.keeper = Keeper(world, post, job.directory, shelves, resume, job.until, self._describe)
        if settled is not None:
            self._go_on(settled)
        elif resume is not None:
            self.progress.say(f"going on from {resume.note}")
        log.info("%s", self._survives(len(settled.lacking) if settled else 0))
        self._begin(self.course.phase)
        if self.stopped_by:
            self._tell_all({"kind": "phase", "stop": True})

    def _survives(self, lacking: int) -> str:
        """How many losses this layout survives, when the copies that are lacking are rebuilt."""
        if not self.world.survivable:
            return "a lost rank ends the job; one under Open MPI's mpirun --with-ft ulfm would go on"
        servers = self.world.layout.survives(self.config.server.copies)
        when = f" when {lacking} copies are rebuilt" if lacking else ""
        return f"survives the loss of {servers} servers at once{when}, and of any worker or data rank"

    def state(self) -> dict[str, Any]:
        """What whoever is head in the next generation has to know."""
        phase, course = self.course.phase, self.course
        return {
            "number": self.number,
            "phase": None if phase is None else [phase.number, phase.part, phase.epoch],
            "best": [course.best, course.best_epoch],
            "reason": course.reason,
            "results": self.results,
            "train_seconds": self.train_seconds,
            "began": self.began_at,
            "stopped_by": self.stopped_by,
            # A snapshot that is under way is given up with the generation.
            "stale": self.keeper.stale or self.keeper.snapshots.busy,
            "snapshots": self.keeper.snapshots.taken,
            "recoveries": self.told_recoveries(),
            "pushes": self.board.of_pushers(),
        }

    def _go_on(self, settled: Settlement) -> None:
        """From where the head of the generation before was; a phase that was under way has a new number."""
        state, course = settled.head, self.course
        if state is not None:
            phase = state["phase"]
            course.phase = None if phase is None else Phase(phase[0] + 1, *phase[1:])
            (course.best, course.best_epoch), course.reason = state["best"], state["reason"]
            self.results, self.train_seconds, self.stopped_by = (
                state["results"], state["train_seconds"], state["stopped_by"]
            )  # fmt: skip
            self.number, self.began_at = state["number"], state["began"]
            self.began = time.monotonic() - (time.time() - self.began_at)
            self.keeper.stale, self.keeper.snapshots.taken = state["stale"], state["snapshots"]
            # Whoever is still writing one of the generation before must not meet the next.
            self.keeper.snapshots.number = 1000 * self.world.generation
            self.recoveries = _went_on(state["recoveries"], *settled.went_on)
            self.board.go_on(state["pushes"])
        gone = self.world.gone
        names = "; ".join(map(str, gone))
        told = self.board.of_pushers()
        pairs = [told[str(place.member)] for place in gone if str(place.member) in told]
        self.recoveries.append(
            {
                "generation": self.world.generation, "dead": [str(place) for place in gone],
                "members": [place.member for place in gone], "detected": settled.detected,
                "seconds": None, "seconds_all": None, "promoted": settled.promoted, "rebuilt": 0,
                "resent": settled.resent, "lost": sum(sent - known for sent, known in pairs), "duplicates": 0,
            }
        )  # fmt: skip
        took, ranks = time.time() - settled.detected, len(self.members)
        text = f"generation {self.world.generation} goes on with {ranks} ranks after {took:.2f} s"
        self.progress.say(f"{names} lost; {text}" if names else f"ranks have joined; {text}")
        log.warning("%s: lost %s", text, names or "nobody")

    def told_recoveries(self) -> list[dict[str, Any]]:
        """With what the servers have told since the last one."""
        words = [word for word in self.board.of("server") if word.get("generation") == self.world.generation]
        if not self.recoveries or not words:
            return self.recoveries
        *earlier, last = _went_on(self.recoveries, *earliest(word["went_on"] for word in words))
        rebuilt, dropped = (sum(word[key] for word in words) for key in ("rebuilt", "dropped"))
        return [*earlier, last | {"rebuilt": rebuilt, "duplicates": dropped}]

    def step(self) -> bool:
        self._notice_stop()
        self._check_silence()
        phase = self.course.phase
        if phase is None:
            return self._finish()
        self._look_for_requests()
        if why := self.keeper.look(phase.training):
            self._stop(why)
            return True
        if self._phase_done(phase):
            self._end_phase(phase)
            return True
        if not self.closed and phase.training and self._quorum(phase):
            self.closed = True
            self._tell_all({"kind": "phase", "close": True})
        if time.monotonic() - self.shown >= self.config.observe.interval:
            self._show(phase)
        return False

    def _notice_stop(self) -> None:
        """Stopped for a while, or starved, this rank may have been taken for dead: then others write in its place.

        If not, it could hear nobody meanwhile, and holds that against nobody.
        """
        now = time.monotonic()
        stopped, self.stepped = now - self.stepped, now
        if stopped > FENCE_SECONDS:
            fence.check(self.directory / "log", self.world.generation, self.world.place.member)
            self.heard = {rank: heard + stopped for rank, heard in self.heard.items()}

    def hear(self, source: int, message: dict[str, Any]) -> None:
        self.heard[source] = time.monotonic()
        if message["kind"] == "stats":
            self.board.hear(self.members[source], message)
            self.keeper.forget_old_stores(self.board)
        elif message["kind"] == "compared":
            self._compared(source, message)
        else:
            self.keeper.snapshots.hear(source, message)

    def _look_for_requests(self) -> None:
        """Whoever makes the file COMPARE wants to know whether all copies are the same."""
        if time.monotonic() - self.looked < LOOK_SECONDS:
            return
        self.looked = time.monotonic()
        if (self.directory / COMPARE).exists():
            (self.directory / COMPARE).unlink()
            self.compared = {}
            for rank in self.world.layout.servers:
                self.post.send({"kind": "store", "order": "compare"}, rank)
        wanted = self._wanted_ranks()
        if wanted:
            log.info("%d ranks more are wanted", wanted)
            self._tell_all({"kind": "grow", "ranks": wanted})

    def _wanted_ranks(self) -> int:
        """As many as somebody wants by the file GROW, or as were lost, once the others have gone on."""
        if not self.world.survivable:
            return 0
        file, missing = self.directory / GROW, self.missing
        if missing and self.told_recoveries()[-1]["seconds"] is not None:
            self.missing = 0
            return missing
        try:
            text = file.read_text()
            file.unlink()
            return int(text)
        except (OSError, ValueError):
            return 0

    def _compared(self, source: int, message: dict[str, Any]) -> None:
        self.compared[source] = message
        if len(self.compared) == len(self.world.layout.servers):
            totals = {key: sum(word[key] for word in self.compared.values()) for key in ("copies", "different")}
            write_json(self.directory / "copies.json", totals | {"generation": self.world.generation})

    def _begin(self, phase: Phase | None) -> None:
        self.number += 1
        order = {"kind": "phase", "phase": None if phase is None else [phase.number, phase.part, phase.epoch]}
        # To everybody: whoever is left goes on from here when this rank is lost.
        self._tell_all(order | {"state": self.state()})
        self.closed = False
        self.phase_began = self.shown = time.monotonic()
        if phase is not None:
            log.info("phase %d: %s, epoch %d", phase.number, phase.part, phase.epoch)
            self.keeper.stale |= phase.training

    def _tell_all(self, message: dict[str, Any]) -> None:
        for place in self.world.layout.places:
            self.post.send(message, place.rank)

    def _quorum(self, phase: Phase) -> bool:
        """Whether enough replicas are done with their shares to end an epoch, but not all."""
        owed = self.board.owed(phase, len(self.world.layout.data))
        return owed.count(0) < len(owed) <= owed.count(0) / self.config.epoch.quorum

    def _phase_done(self, phase: Phase) -> bool:
        shares = self.board.shares(phase)
        return len(shares) == len(self.world.layout.data) and all(share["done"] for share in shares)

    def _end_phase(self, phase: Phase) -> None:
        seconds = time.monotonic() - self.phase_began
        figures = self.board.figures(phase, seconds)
        self.progress.end(self._report(phase, figures, done=True))
        if phase.training:
            self.train_seconds += seconds
            self.results |= {"epochs": phase.epoch, "train_loss": figures["loss"]}
            self.results["images"] += figures["images"]
            self.results["images_skipped"] += figures["images_skipped"]
            self.keeper.epoch_ended()
        else:
            self.results |= {f"{phase.part}_accuracy": figures["accuracy"], f"{phase.part}_loss": figures["loss"]}
        self._write_summary("running")
        self._begin(self.course.advance(figures["accuracy"]))

    def _finish(self) -> bool:
        """Workers have stopped: let the servers write and end, then put the results together."""
        layout = self.world.layout
        workers = self.board.finals("worker", self.members) == len(layout.workers)
        if self.finished or not workers or not self.keeper.finished():
            return False
        if not self.finishing:
            self.finishing = True
            copies = str(self.directory / "conservation") if self.config.inject.conserve else None
            for rank in layout.servers:
                self.post.send({"kind": "store", "order": "finish", "copies": copies}, rank)
            return True
        if self.board.finals("server", self.members) < len(layout.servers):
            return False
        self._end()
        for place in layout.places:
            self.post.send({"kind": "over"}, place.rank)
        self.finished = True
        return True

    def _stop(self, why: str) -> None:
        """End the job in order, inside an epoch if need be: `--resume` goes on from there."""
        log.info("the job is stopped by %s", why)
        self.stopped_by = self.course.reason = why
        self.course.phase = None
        self._tell_all({"kind": "phase", "stop": True})

    def _end(self) -> None:
        """The marker comes last: all that it stands for is there."""
        self._check_short()
        self.metrics.close()
        self.progress.close()
        if self.stopped_by:
            self._write_summary("stopped")
            (self.directory / "STOPPED").write_text(f"{self.stopped_by}\n")
            self.progress.say(f"stopped by {self.stopped_by}; go on with --run {self.directory} --resume")
            return
        self.keeper.write_weights()
        self._write_summary("done")
        (self.directory / "DONE").touch()
        self._say_result()

    @property
    def _judged(self) -> list[int] | None:
        """Whose acknowledged pushes must be in the weights: everybody's, in synchronous training of who pushes now.

        There a clock that others had acknowledged, but not all strips or only the dead, was computed again.
        """
        layout = self.world.layout
        if self.config.consistency.staleness > 0:
            return None
        return [layout.places[rank].member for rank in layout.workers]

    def _check_short(self) -> None:
        """Raise LostState if a shard lacks a push that its pusher counts as acknowledged: the weights are not whole."""
        short = self.board.short(self.members, self._judged)
        if short:
            whose = ", ".join(f"{count} of rank {pusher}" for pusher, count in sorted(short.items()))
            raise LostState(f"acknowledged pushes are not in all weights: {whose}; the job is not done")

    def _describe(self) -> dict[str, Any]:
        """What snapshots say about the job besides its position."""
        best = {"best": self.course.best, "best_epoch": self.course.best_epoch}
        inputs = Inputs.of(self.data.preparation).to_json()
        return {"epochs": self.results["epochs"], "kernels": self.kernels, "inputs": inputs} | best

    def _say_result(self) -> None:
        keys = [key for key in ("test_accuracy", "validation_accuracy") if key in self.results]
        told = f"{keys[0].replace('_', ' ')} {self.results[keys[0]]:.2%}" if keys else "trained"
        rate = self.results["images"] / max(self.train_seconds, 1e-9)
        seconds = time.monotonic() - self.began
        self.progress.say(f"{told} after {seconds:.1f} s, {rate:.0f} images/s in training")
        self.progress.say(f"summary: {self.directory / 'summary.json'}")

    def _check_silence(self) -> None:
        limit = self.config.cluster.seconds
        for rank, heard in self.heard.items():
            if time.monotonic() - heard > limit:
                raise RankFailure(f"{self.world.layout.places[rank]} has not been heard of for {limit:g} s")

    def _show(self, phase: Phase) -> None:
        self.shown = time.monotonic()
        figures = self.board.figures(phase, self.shown - self.phase_began)
        self.progress.update(self._report(phase, figures, done=False))

    def _report(self, phase: Phase, figures: dict[str, float], done: bool) -> dict[str, Any]:
        """Write the metrics and the state of the job; returns the state."""
        seconds = round(time.monotonic() - self.began, 3)
        line = {"seconds": seconds, "phase": phase.number, "part": phase.part, "epoch": phase.epoch, "done": done}
        trained = self.trained_before + self.results["images"] + (figures["images"] if phase.training else 0)
        self.metrics.write(line | {"images_trained": trained} | figures | self.board.gauges(), trained)
        share = figures["images"] / max(self.data.count(phase.part), 1)
        run = figures | {"name": self.progress.name(phase), "share": share, "eta": self._left(phase, figures)}
        rows = self.board.ranks(self.world.layout)
        state = {"time": time.time(), "seconds": seconds, "interval": self.config.observe.interval, "run": run}
        state |= {"groups": status.groups(rows), "ranks": rows}
        write_json(self.directory / "status.json", state)
        self._tell_trouble()
        return state

    def _tell_trouble(self) -> None:
        """The first NaN of the job, once."""
        for rank, trouble in self.board.troubles().items():
            if not self.troubled:
                self.troubled = True
                self.progress.say(f"rank {rank}: {describe(trouble)} (server.on_nan = {self.config.server.on_nan})")

    def _left(self, phase: Phase, figures: dict[str, float]) -> float | None:
        """Seconds of training that are left, at the speed so far."""
        images = self.data.count("train") * (self.config.train.epochs - phase.epoch)
        if not phase.training or not figures["images"]:
            return None
        return (images + self.data.count("train") - figures["images"]) / figures["images_per_second"]

    def _write_summary(self, status: str) -> None:
        layout = self.world.layout
        ranks = {"data": len(layout.data), "worker": len(layout.workers), "server": len(layout.servers)}
        summary = {
            "status": status,
            "stopped_by": self.course.reason,
            "resumed": self.resumed,
            **self.results,
            "best_accuracy": self.course.best,
            "best_epoch": self.course.best_epoch,
            "images_bad": self.board.bad(),
            "seconds": round(time.monotonic() - self.began, 3),
            "images_per_second": round(self.results["images"] / max(self.train_seconds, 1e-9), 1),
            "generation": self.world.generation,
            "ranks": ranks | {"total": len(layout.places), "replicas": layout.replicas},
            "pushes": self.board.pushes(self.members, self._judged),
            "pulls": self.board.pulls(),
            "workers": self.board.workers(),
            "traffic": self.board.traffic(),
            "not_finite": self.board.troubles(),
            "cpu_seconds": self.board.cpu(),
            "staleness": self.board.distribution("leads") | {"clock_wait": self.board.clock_wait()},
            "delay": self.board.distribution("delays"),
            "snapshots": self.keeper.snapshots.taken,
            "store": {str(word["rank"]): word["store"] for word in self.board.of("server") if word["store"]},
            "recoveries": self.told_recoveries(),
            "provenance": self.provenance,
        }
        # Once a failure is told, the summary says why the job ends.
        if not (self.directory / "log" / "failure.txt").exists():
            write_json(self.directory / "summary.json", summary)


def _went_on(recoveries: list[dict[str, Any]], first: float | None, whole: float | None) -> list[dict[str, Any]]:
    """Those whose end was not known end now; a generation that was over before its first push is part of the next."""
    now = {"seconds": first, "seconds_all": whole}
    ends = ({key: at for key, at in now.items() if at and recovery[key] is None} for recovery in recoveries)
    return [
        recovery | {key: round(at - recovery["detected"], 3) for key, at in end.items()}
        for recovery, end in zip(recoveries, ends, strict=True)
    ]
