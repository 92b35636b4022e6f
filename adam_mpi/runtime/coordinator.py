"""The head: the first data rank moves the job from phase to phase, hears from everybody, and writes what people see."""

import logging
import threading
import time
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from adam_mpi.base.errors import LostRun, LostState, RankFailure, Stall, UserError
from adam_mpi.base.files import write_json
from adam_mpi.base.provenance import provenance
from adam_mpi.checkpoint.disk_task import DiskTask, disk_seconds, reason
from adam_mpi.cluster import fence, sentinel
from adam_mpi.cluster.messages import (
    BeginPhase,
    ClosePhase,
    CompareCopies,
    CopiesCompared,
    FinishServer,
    Grow,
    JobOver,
    Message,
    SnapshotHeld,
    SnapshotWritten,
    SparesReport,
    Spawn,
    Statistics,
    StopTraining,
)
from adam_mpi.cluster.watchdog import Wait
from adam_mpi.data.inputs import Inputs
from adam_mpi.data.server import DataServer
from adam_mpi.monitor import outcome, status
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.monitor.metrics import Metrics
from adam_mpi.monitor.progress import Progress
from adam_mpi.monitor.request_watcher import RequestWatcher
from adam_mpi.monitor.status_writer import StatusWriter
from adam_mpi.runtime.checkpoint_manager import CheckpointManager
from adam_mpi.runtime.job import Job
from adam_mpi.runtime.recovery import RecoveryPlan, earliest
from adam_mpi.sharding.phases import Phase, PhaseSchedule
from adam_mpi.transport.generation import Generation
from adam_mpi.worker.diagnostics import describe

FENCE_SECONDS, EVICTED_SECONDS, SETTLE_SECONDS = 1.0, 10.0, 5.0
log = logging.getLogger(__name__)


class Coordinator:
    def __init__(
        self,
        generation: Generation,
        data: DataServer,
        job: Job,
        settled: RecoveryPlan | None = None,
        before: "Coordinator | None" = None,
    ) -> None:
        """`settled`: what came out of the generation before; `before`: its head, if that was here."""
        self.world = world = generation.world
        self.config = world.config
        self.data = data
        self.channel = generation.channel
        self.directory = job.directory
        self.statistics: JobStatistics = before.statistics if before else JobStatistics()
        resume = job.resume
        epochs, best, midway = (resume.epochs, resume.best, resume.midway) if resume else (0, (-1.0, 0), False)
        self.course = PhaseSchedule(self.config.train, data.count("validation") > 0, epochs, best, midway)
        self.progress = Progress(self.config.train.epochs)
        self.status_writer: StatusWriter = (
            before.status_writer if before else StatusWriter(job.directory, job.owner.check)
        )
        self.requests_seen: RequestWatcher = (
            before.requests_seen if before else RequestWatcher(job.directory, job.owner.beat())
        )
        tensorboard = self.config.observe.tensorboard
        self.metrics: Metrics = before.metrics if before else Metrics(job.directory, tensorboard)
        if before:
            before.checkpoints.snapshots.abandon()
        self.began = self.shown = self.phase_began = now = time.monotonic()
        self.heard = dict.fromkeys((place.rank for place in world.layout.places if place.roles), now)
        self.members = [place.member for place in world.layout.places]
        self.began_at, self.number = time.time(), 0
        self.recoveries: list[dict[str, Any]] = []
        self.stepped = now
        self.evicted: dict[int, float] = {}
        """Ranks whose sentinel was told to end them, since when."""
        self.compared = dict[int, CopiesCompared]()
        self.full = world.full
        """How many ranks there should be."""
        self.standing_by: dict[int, SparesReport] = {}
        """What ranks have told of the spares they have started: how many are ready, and how many are on their way."""
        self.started: list[dict[str, float]] = []
        """Seconds and CPU seconds that spares have taken to get ready."""
        self.refused = self.told_refusal = False
        """Whether the launcher had no place for one more, in this generation, and whether people know."""
        self.results: dict[str, Any] = {"epochs": epochs, "images": 0, "images_skipped": 0, "train_loss": None}
        self.train_seconds, self.trained_before = 0.0, resume.images if resume else 0
        self.troubled = False
        self.provenance = provenance(world.hosts, self.config.run.seed)
        self.closed = self.finishing = self.finished = False
        self.ending: DiskTask[None] | None = before.ending if before else None
        """Writing the results; a loss meanwhile changes nothing about them."""
        self.resumed, self.stopped_by = resume.note if resume else "", ""
        self.kernels = job.kernels
        self.checkpoints: CheckpointManager = CheckpointManager(generation, job, self._describe)
        if settled is not None:
            self._go_on(settled)
        elif resume is not None:
            self.progress.say(f"going on from {resume.note}")
        log.info("%s", self._survives(len(settled.lacking) if settled else 0))
        self._begin(self.course.phase)
        if self.stopped_by:
            self._tell_all(StopTraining())

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
            "stale": self.checkpoints.stale or self.checkpoints.snapshots.busy,
            "snapshots": self.checkpoints.snapshots.taken,
            "recoveries": self.told_recoveries(),
            "pushes": self.statistics.of_pushers(),
            "carried": self.statistics.carried(),
            "started": self.started,
            "told_refusal": self.told_refusal,
        }

    def _go_on(self, settled: RecoveryPlan) -> None:
        """From where the head of the generation before was; a phase that was under way has a new number."""
        state, course = settled.head, self.course
        if state is not None:
            phase = state["phase"]
            course.phase = None if phase is None else Phase(phase[0] + 1, *phase[1:])
            (course.best, course.best_epoch), course.reason = state["best"], state["reason"]
            self.results, self.train_seconds, self.stopped_by = (
                state["results"],
                state["train_seconds"],
                state["stopped_by"],
            )
            self.number, self.began_at = state["number"], state["began"]
            self.began = time.monotonic() - (time.time() - self.began_at)
            self.checkpoints.stale, self.checkpoints.snapshots.taken = state["stale"], state["snapshots"]
            # Whoever is still writing one of the generation before must not meet the next.
            self.checkpoints.snapshots.number = 1000 * self.world.generation
            self.recoveries = _went_on(state["recoveries"], *settled.went_on)
            self.statistics.go_on(state["pushes"], state["carried"])
            self.started, self.told_refusal = state["started"], state["told_refusal"]
        gone = self.world.gone
        names = "; ".join(map(str, gone))
        told = self.statistics.of_pushers()
        pairs = [told[str(place.member)] for place in gone if str(place.member) in told]
        self.recoveries.append(
            {
                "generation": self.world.generation,
                "dead": [str(place) for place in gone],
                "members": [place.member for place in gone],
                "detected": settled.detected,
                "seconds": None,
                "seconds_all": None,
                "promoted": settled.promoted,
                "rebuilt": 0,
                "resent": settled.resent,
                "lost": sum(sent - known for sent, known in pairs),
                "duplicates": 0,
            }
        )
        took, ranks = time.time() - settled.detected, len(self.members)
        text = f"generation {self.world.generation} goes on with {ranks} ranks after {took:.2f} s"
        self.progress.say(f"{names} lost; {text}" if names else f"ranks have joined; {text}")
        log.warning("%s: lost %s", text, names or "nobody")

    def told_recoveries(self) -> list[dict[str, Any]]:
        """With what the servers have told since the last one."""
        words = [word for word in self.statistics.of("server") if word.get("generation") == self.world.generation]
        if not self.recoveries or not words:
            return self.recoveries
        *earlier, last = _went_on(self.recoveries, *earliest(word["went_on"] for word in words))
        rebuilt, dropped = (sum(word[key] for word in words) for key in ("rebuilt", "dropped"))
        return [*earlier, last | {"rebuilt": rebuilt, "duplicates": dropped}]

    def step(self) -> bool:
        self._notice_stop()
        self._check_silence()
        self.status_writer.look()
        self.checkpoints.snapshots.step()
        phase = self.course.phase
        if phase is None:
            return self._finish()
        self._look_for_requests()
        if why := self.checkpoints.look(phase.training, self.requests_seen.stop):
            self._stop(why)
            return True
        if self._phase_done(phase):
            self._end_phase(phase)
            return True
        if not self.closed and phase.training and self._quorum(phase):
            self.closed = True
            self._tell_all(ClosePhase())
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
            self._check_place()
            waited = time.monotonic() - now
            self.stepped += waited
            self.heard = {rank: heard + stopped + waited for rank, heard in self.heard.items()}

    def _check_place(self) -> None:
        """Raise Evicted or LostRun where others have this rank's place; a disk that does not answer proves nothing."""
        found: list[Exception] = []

        def look() -> None:
            try:
                with suppress(OSError):
                    fence.check(self.directory / "log", self.world.generation, self.world.place.member)
                self.checkpoints.owner.check()
            except (fence.Evicted, LostRun) as error:
                found.append(error)

        if not sentinel.within(SETTLE_SECONDS, look):
            log.warning("%s does not answer; whether others have this rank's place is not known", self.directory)
        for error in found:
            raise error

    def handle(self, source: int, message: Message) -> None:
        self.heard[source] = time.monotonic()
        match message:
            case Statistics():
                self.statistics.update(self.members[source], message)
                self.checkpoints.forget_old_stores(self.statistics)
            case CopiesCompared():
                self._compared(source, message)
            case SparesReport():
                self._hear_of_spares(source, message)
            case SnapshotHeld() | SnapshotWritten():
                self.checkpoints.snapshots.handle(source, message)
            case _:
                raise TypeError(f"the coordinator does not handle {message}")

    def _look_for_requests(self) -> None:
        """Whoever makes the file COMPARE wants to know whether all copies are the same."""
        if self.requests_seen.take_compare():
            self.compared = {}
            for rank in self.world.layout.servers:
                self.channel.send(CompareCopies(), rank)
        if self.world.survivable:
            self.full += self.requests_seen.take_ranks()
            self._keep_full()

    def _keep_full(self) -> None:
        """Let those in who stand by when ranks are missing; have new ones started, once the others have gone on."""
        ready, coming = self.spares
        missing = self.full - len(self.members)
        if may_join(missing, ready, coming):
            log.info("%d ranks that stand by join", min(missing, ready))
            self._tell_all(Grow(self.full))
        elif not self.refused and not (self.recoveries and self.told_recoveries()[-1]["seconds"] is None):
            wanted = missing + self.config.recover.spares - ready - coming
            if wanted > 0:
                starter = self.world.layout.starter
                log.info("rank %d starts %d new ranks", self.members[starter], wanted)
                told = self.standing_by.get(starter, SparesReport(0, 0, False, []))
                self.standing_by[starter] = replace(told, coming=told.coming + wanted)
                self.channel.send(Spawn(wanted), starter)

    @property
    def spares(self) -> tuple[int, int]:
        """Those who are ready to join, and those who are on their way."""
        reports = self.standing_by.values()
        return sum(report.ready for report in reports), sum(report.coming for report in reports)

    def _hear_of_spares(self, source: int, message: SparesReport) -> None:
        self.standing_by[source] = message
        self.started += message.started
        self.refused |= message.refused
        if message.refused and not self.told_refusal:
            self.told_refusal = True
            self.progress.say("mpirun has no slot for a new rank; the job goes on without (more: --host localhost:N)")

    def _compared(self, source: int, message: CopiesCompared) -> None:
        self.compared[source] = message
        if len(self.compared) == len(self.world.layout.servers):
            totals = {
                key: sum(getattr(said, key) for said in self.compared.values()) for key in ("copies", "different")
            }
            path, content = self.directory / "copies.json", totals | {"generation": self.world.generation}
            self.status_writer.want(path.name, partial(write_json, path, content))

    def _begin(self, phase: Phase | None) -> None:
        self.number += 1
        numbers = None if phase is None else [phase.number, phase.part, phase.epoch]
        # All ranks keep the state: the next coordinator continues from it when this rank is lost.
        self._tell_all(BeginPhase(numbers, self.state()))
        self.closed = False
        self.phase_began = self.shown = time.monotonic()
        if phase is not None:
            log.info("phase %d: %s, epoch %d", phase.number, phase.part, phase.epoch)
            self.checkpoints.stale |= phase.training

    def _tell_all(self, message: Message) -> None:
        for place in self.world.layout.places:
            self.channel.send(message, place.rank)

    def _quorum(self, phase: Phase) -> bool:
        """Whether enough replicas are done with their shares to end an epoch, but not all."""
        owed = self.statistics.owed(phase, len(self.world.layout.data))
        return owed.count(0) < len(owed) <= owed.count(0) / self.config.epoch.quorum

    def _phase_done(self, phase: Phase) -> bool:
        shares = self.statistics.shares(phase)
        return len(shares) == len(self.world.layout.data) and all(share["done"] for share in shares)

    def _end_phase(self, phase: Phase) -> None:
        seconds = time.monotonic() - self.phase_began
        figures = self.statistics.figures(phase, seconds)
        self.progress.end(self._report(phase, figures, done=True))
        if phase.training:
            self.train_seconds += seconds
            self.results |= {"epochs": phase.epoch, "train_loss": figures["loss"]}
            self.results["images"] += figures["images"]
            self.results["images_skipped"] += figures["images_skipped"]
            self.checkpoints.epoch_ended()
        else:
            self.results |= {f"{phase.part}_accuracy": figures["accuracy"], f"{phase.part}_loss": figures["loss"]}
        self.status_writer.want("summary.json", partial(self._write_summary, self._summary("running")))
        self._begin(self.course.advance(figures["accuracy"]))

    def _finish(self) -> bool:
        """Workers have stopped: let the servers write and end, then put the results together."""
        layout = self.world.layout
        workers = self.statistics.finals("worker", self.members) == len(layout.workers)
        if self.finished or not workers or not self.checkpoints.finished():
            return False
        if not self.finishing:
            self.finishing = True
            copies = str(self.directory / "conservation") if self.config.inject.conserve else None
            for rank in layout.servers:
                self.channel.send(FinishServer(copies), rank)
            return True
        if self.statistics.finals("server", self.members) < len(layout.servers):
            return False
        if self.ending is None:
            self._check_short()
            if not self.stopped_by:
                self.results["warnings"] = self._warnings()
            summary = self._summary("stopped" if self.stopped_by else "done")
            self.ending = DiskTask("results", partial(self._write_results, summary), disk_seconds(self.config))
        if not self.ending.over:
            return False
        self._end(self.ending)
        for place in layout.places:
            self.channel.send(JobOver(), place.rank)
        self.finished = True
        return True

    def _stop(self, why: str) -> None:
        """End the job in order, inside an epoch if need be: `--resume` goes on from there."""
        log.info("the job is stopped by %s", why)
        self.stopped_by = self.course.reason = why
        self.course.phase = None
        self._tell_all(StopTraining())

    def _write_results(self, summary: dict[str, Any]) -> None:
        """What a job must leave behind; the marker comes last: all that it stands for is there."""
        self.checkpoints.owner.check()
        self.status_writer.forget("summary.json")
        self.status_writer.settle(SETTLE_SECONDS)
        if not self.stopped_by:
            self.checkpoints.write_weights()
        self._write_summary(summary)
        marker, text = ("STOPPED", f"{self.stopped_by}\n") if self.stopped_by else ("DONE", "")
        # Writing the weights may have taken longer than an owner may be silent.
        self.checkpoints.owner.check()
        (self.directory / marker).write_text(text)

    def _end(self, ending: DiskTask[None]) -> None:
        """The results are written, or the job has none."""
        self.progress.close()
        try:
            ending.result()
        except (OSError, RuntimeError) as error:
            # HDF5 has errors of its own.
            raise UserError(f"the results could not be written: {reason(error)}; make room and --resume") from None
        if self.stopped_by:
            self.progress.say(f"stopped by {self.stopped_by}; go on with --run {self.directory} --resume")
        else:
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
        short = self.statistics.short(self.members, self._judged)
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
        for warning in self.results["warnings"]:
            self.progress.say(f"warning: {warning}")

    def _check_silence(self) -> None:
        """A rank that is not heard of ends the job, or is ended itself where the others can go on without it."""
        now, limit = time.monotonic(), self.config.cluster.seconds
        for rank in [rank for rank, heard in self.heard.items() if now - heard > limit]:
            silent = f"{self.world.layout.places[rank]} has not been heard of for {limit:g} s"
            if not self.world.survivable:
                raise RankFailure(silent)
            if rank not in self.evicted:
                self.evicted[rank] = now
                log.warning("%s; its sentinel is told to end it", silent)
                self._order_end(rank, limit)
            elif now - self.evicted[rank] > EVICTED_SECONDS:
                raise Stall(f"{silent}, and could not be ended in {EVICTED_SECONDS:g} s; the job ends")

    def _order_end(self, rank: int, limit: float) -> None:
        """Leave an order in the run directory; on a thread of its own, as the directory may be what it hangs in."""
        where = self.directory / "log" / "failure.txt", self.world.hosts[rank], self.world.pids[rank]
        arguments = *where, f"was not heard of for {limit:g} s"
        threading.Thread(target=sentinel.order_end, args=arguments, name="evict", daemon=True).start()

    def awaits(self) -> list[Wait]:
        """What the ranks owe that take part in a snapshot."""
        return self.checkpoints.snapshots.awaits()

    def _show(self, phase: Phase) -> None:
        self.shown = time.monotonic()
        figures = self.statistics.figures(phase, self.shown - self.phase_began)
        self.progress.update(self._report(phase, figures, done=False))

    def _report(self, phase: Phase, figures: dict[str, float], done: bool) -> dict[str, Any]:
        """Write the metrics and the state of the job; returns the state."""
        seconds = round(time.monotonic() - self.began, 3)
        line = {"seconds": seconds, "phase": phase.number, "part": phase.part, "epoch": phase.epoch, "done": done}
        trained = self.trained_before + self.results["images"] + (figures["images"] if phase.training else 0)
        self.metrics.add(line | {"images_trained": trained} | figures | self.statistics.gauges(), trained)
        self.status_writer.want("metrics.jsonl", self.metrics.write)
        share = figures["images"] / max(self.data.count(phase.part), 1)
        run = figures | {"name": self.progress.name(phase), "share": share, "eta": self._left(phase, figures)}
        rows = self.statistics.ranks(self.world.layout)
        state = {"time": time.time(), "seconds": seconds, "interval": self.config.observe.interval, "run": run}
        ready, coming = self.spares
        state |= {"groups": status.groups(rows), "ranks": rows, "spares": {"ready": ready, "coming": coming}}
        path = self.directory / "status.json"
        self.status_writer.want(path.name, partial(write_json, path, state))
        self._tell_trouble()
        self._check_losses(phase, figures, done)
        return state

    def _tell_trouble(self) -> None:
        """The first NaN of the job, once."""
        for rank, trouble in self.statistics.troubles().items():
            if not self.troubled:
                self.troubled = True
                self.progress.say(f"rank {rank}: {describe(trouble)} (server.on_nan = {self.config.server.on_nan})")

    def _check_losses(self, phase: Phase, figures: dict[str, float], done: bool) -> None:
        """End a job that computes nothing any more but NaN."""
        if self.config.inject.conserve or not outcome.diverged(figures, self.config.train.batch, done):
            return
        self.status_writer.want("summary.json", partial(self._write_summary, self._summary("running")))
        self.status_writer.settle(SETTLE_SECONDS)
        count, rate = figures["images_not_finite"], self.config.optimizer.learning_rate
        raise UserError(
            f"{self.progress.name(phase)}: the loss of {count} of {figures['images']} images is not finite; set "
            f"optimizer.learning_rate below {rate:g}, or data.transform.normalize = true where inputs are large"
        )

    def _warnings(self) -> list[str]:
        """What makes the end of this job no success."""
        if self.config.inject.conserve:
            return []
        parts = [part for part in ("test", "validation") if f"{part}_accuracy" in self.results]
        labels = {part: self.data.data.labels(part) for part in parts}
        return outcome.warnings(self.results, labels, self.statistics.gauges()["layers"])

    def _left(self, phase: Phase, figures: dict[str, float]) -> float | None:
        """Seconds of training that are left, at the speed so far."""
        images = self.data.count("train") * (self.config.train.epochs - phase.epoch)
        if not phase.training or not figures["images"]:
            return None
        return (images + self.data.count("train") - figures["images"]) / figures["images_per_second"]

    def _summary(self, status: str) -> dict[str, Any]:
        layout = self.world.layout
        ranks = {"data": len(layout.data), "worker": len(layout.workers), "server": len(layout.servers)}
        return {
            "status": status,
            "stopped_by": self.course.reason,
            "resumed": self.resumed,
            **self.results,
            "best_accuracy": self.course.best,
            "best_epoch": self.course.best_epoch,
            "images_bad": self.statistics.bad(),
            "seconds": round(time.monotonic() - self.began, 3),
            "images_per_second": round(self.results["images"] / max(self.train_seconds, 1e-9), 1),
            "generation": self.world.generation,
            "ranks": ranks | {"total": len(layout.places), "replicas": layout.replicas},
            "pushes": self.statistics.pushes(self.members, self._judged),
            "residual": self.statistics.residual([layout.places[rank].member for rank in layout.workers]),
            "pulls": self.statistics.pulls(),
            "workers": self.statistics.workers(),
            "traffic": self.statistics.traffic(),
            "not_finite": self.statistics.troubles(),
            "cpu_seconds": self.statistics.cpu(),
            "staleness": self.statistics.distribution("leads") | {"clock_wait": self.statistics.clock_wait()},
            "delay": self.statistics.distribution("delays"),
            "snapshots": self.checkpoints.snapshots.taken,
            "store": {str(word["rank"]): word["store"] for word in self.statistics.of("server") if word["store"]},
            "recoveries": self.told_recoveries(),
            "started": self.started,
            "provenance": self.provenance,
        }

    def _write_summary(self, summary: dict[str, Any]) -> None:
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


def may_join(missing: int, ready: int, coming: int) -> bool:
    """Whether those who stand by join now: all that are missing at once, as each time stops the others; or the last."""
    return missing > 0 and ready > 0 and (ready >= missing or not coming)
