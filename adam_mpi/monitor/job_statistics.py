"""The last report of every rank, and the statistics of the whole job that follow from them."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, cast, overload

import numpy as np

from adam_mpi.cluster.control_messages import Statistics
from adam_mpi.cluster.layout import Layout
from adam_mpi.cluster.role_statistics import (
    DataStatistics,
    LayerStatistics,
    NotFiniteStatistics,
    Reporter,
    RoleName,
    RoleStatistics,
    ServerStatistics,
    WorkerStatistics,
)
from adam_mpi.model.metrics import ACCURACY, MetricSet
from adam_mpi.monitor import status
from adam_mpi.monitor.aggregate_statistics import (
    Distribution,
    Gauges,
    WorkerTimes,
    applied_pushes,
    coarse_histogram,
    distribution,
    histogram_mean,
    mean_of_ranks,
)
from adam_mpi.monitor.divergence import LossTotals
from adam_mpi.monitor.status import Activity, RankRow
from adam_mpi.sharding.training_state import Phase


@dataclass(frozen=True)
class Report:
    """What a role of a rank has reported last."""

    values: RoleStatistics
    received: float
    """When it came, by the coordinator's monotonic clock."""
    final: bool = False
    """Whether the role has ended; later reports change nothing about that."""


class JobStatistics:
    """Collects the reports of all ranks and sums them up."""

    def __init__(self, metrics: MetricSet = ACCURACY) -> None:
        """Begin the statistics of a job, whose figures are computed by `metrics`."""
        self.metrics = metrics
        self.reports: dict[Reporter, Report] = {}
        self.timed: dict[Reporter, tuple[float, RoleStatistics]] = {}
        """Reporter -> the sender's time and the values of its last report at an interval."""
        self.activities: dict[Reporter, Activity] = {}
        """Reporter -> what it did between its last two reports at intervals."""
        self.earlier: dict[int, list[int]] = {}
        """Pusher -> its pushes sent and acknowledged, as an earlier coordinator received them."""
        self.earlier_carried: dict[str, float] = {}
        """Pusher -> what its codec carried, as an earlier coordinator received it."""

    def continue_from(self, pushes: Mapping[str, list[int]], carried: Mapping[str, float]) -> None:
        """Take over an earlier coordinator's statistics of the pushers; most of them will report again."""
        self.earlier |= {int(pusher): counts for pusher, counts in pushes.items()}
        self.earlier_carried |= carried

    def update(self, rank: int, message: Statistics) -> None:
        """Take the statistics that a role of `rank`, the number of the rank for the whole job, reports."""
        values = cast(RoleStatistics, message.values)
        key = (values["role"], rank)
        before = self.reports.get(key)
        # A final report may be followed by one that was due at its interval.
        final = message.final or (before is not None and before.final)
        self.reports[key] = Report(values, time.monotonic(), final)
        if message.at is not None:
            if key in self.timed:
                last, earlier = self.timed[key]
                self.activities[key] = status.activity(earlier, values, message.at - last)
            self.timed[key] = (message.at, values)

    @overload
    def of_role(self, role: Literal["data"]) -> list[DataStatistics]: ...

    @overload
    def of_role(self, role: Literal["worker"]) -> list[WorkerStatistics]: ...

    @overload
    def of_role(self, role: Literal["server"]) -> list[ServerStatistics]: ...

    def of_role(self, role: RoleName) -> list:
        """Return the last statistics that each rank with this `role` reported, by rank."""
        return [report.values for (other, _), report in sorted(self.reports.items()) if other == role]

    def count_finals(self, role: str, members: Collection[int]) -> int:
        """Return how many of the ranks `members` have sent the final report of this `role`."""
        return sum(report.final for (other, rank), report in self.reports.items() if other == role and rank in members)

    def shares(self, phase: Phase) -> list[DataStatistics]:
        """Return the statistics of the data ranks about `phase`."""
        return [report for report in self.of_role("data") if report["phase"] == phase.number]

    def owed(self, phase: Phase, ranks: int) -> list[int]:
        """Return the images that each replica owes of its share in the statistics; empty without all data ranks."""
        shares = self.shares(phase)
        if len(shares) < ranks:
            return []
        return [sum(owed) for owed in zip(*(share["owed"] for share in shares), strict=True)]

    def count_bad_images(self) -> int:
        """Return how many images could not be used by the statistics of the data ranks that have read them."""
        return len({image for report in self.of_role("data") for image in report["bad"]})

    def figures(self, phase: Phase, seconds: float) -> dict[str, float]:
        """Return the figures of `phase` from the statistics of all ranks; it has taken `seconds` so far."""
        shares = self.shares(phase)
        images = sum(share["finished"] for share in shares)
        not_finite = sum(share["not_finite"] for share in shares)
        return {
            "images": int(images),
            "images_not_finite": int(not_finite),
            "images_skipped": sum(share["skipped"] for share in shares),
            "images_per_second": images / max(seconds, 1e-9),
            **self.metrics.values(self._sums(shares, phase), images, images - not_finite),
            "staleness": histogram_mean(self.histogram("leads")),
            "clock_wait": self.clock_wait(),
        }

    def _sums(self, shares: Sequence[DataStatistics], phase: Phase) -> np.ndarray:
        """Return the sums of loss and metrics over the data ranks' statistics in `shares`."""
        sums = np.zeros(self.metrics.size(phase.training))
        for share in shares:
            sums += share["sums"]
        return sums

    def loss_totals(self, phase: Phase, ranks: int) -> LossTotals | None:
        """Return the total losses of `phase` in the statistics; None until all `ranks` data ranks have reported."""
        shares = self.shares(phase)
        if len(shares) < ranks:
            return None
        return LossTotals(
            images=sum(share["finished"] for share in shares),
            loss=float(sum(share["sums"][0] for share in shares)),
            not_finite=sum(share["not_finite"] for share in shares),
        )

    def layers(self) -> dict[str, LayerStatistics]:
        """Return the norms of all layers in the statistics, as workers saw them last."""
        return {name: row for report in self.of_role("worker") for name, row in report["layers"].items()}

    def gauges(self) -> Gauges:
        """Return the job's statistics for `metrics.jsonl` besides the figures of a phase."""
        servers = self.of_role("server")
        server_steps = [seen.apply_batch for (role, _), seen in self.activities.items() if role == "server"]
        return {
            "rate": max((report["rate"] for report in servers), default=0.0),
            "bytes": {
                "pushed": sum(report["pushes"]["bytes"] for report in self.of_role("worker")),
                "pulled": self.pulls()["bytes"],
                "served": sum(report["bytes"] for report in self.of_role("data")),
            },
            "staleness_histogram": {
                str(value): count for value, count in coarse_histogram(self.histogram("leads")).items()
            },
            "apply_batch": round(mean_of_ranks(server_steps), 3),
            "store_lag": max((report["store"]["behind"] for report in servers if report["store"]), default=0.0),
            "busy": {role: round(self._busy(role), 3) for role in ("data", "worker", "server")},
            "layers": self.layers(),
        }

    def _busy(self, role: str) -> float:
        """Return the mean share of time in which ranks with this `role` were busy, from their statistics."""
        return mean_of_ranks([seen.busy for (other, _), seen in self.activities.items() if other == role])

    def rank_rows(self, layout: Layout) -> list[RankRow]:
        """Return a row of statistics about each role of each rank of `layout`."""
        now = time.monotonic()
        silent = {key: now - report.received for key, report in self.reports.items()}
        values = {key: report.values for key, report in self.reports.items()}
        return status.ranks(layout, values, self.activities, silent)

    def carried(self) -> dict[str, float]:
        """Return the length of what each pusher's codec carries, as its statistics reported it last."""
        found = {
            str(report["rank"]): report["carried"] for report in self.of_role("worker") if report["carried"] is not None
        }
        return self.earlier_carried | found

    def residual(self, workers: Collection[int]) -> dict[str, dict[str, float]]:
        """Return, by pusher, the codecs' residual in the statistics: of the `workers`, and lost with other ranks.

        For a rank that was lost this is its last report; for one that has another strip now, what it left behind.
        """
        carried = {pusher: round(length, 6) for pusher, length in self.carried().items()}
        left = {
            str(report["rank"]): round(report["left_behind"], 6)
            for report in self.of_role("worker")
            if report["left_behind"]
        }
        gone = {pusher: length for pusher, length in carried.items() if int(pusher) not in workers}
        return {"carried": {pusher: carried[pusher] for pusher in carried if pusher not in gone}, "lost": gone | left}

    def push_counts(self) -> dict[str, list[int]]:
        """Return from the statistics how many pushes each pusher has sent, and how many it knows as acknowledged."""
        found = {report["rank"]: report["pushes"] for report in self.of_role("worker")}
        counts = {pusher: [pushes["sent"], pushes["acknowledged"]] for pusher, pushes in found.items()}
        return {str(pusher): pair for pusher, pair in (self.earlier | counts).items()}

    def pushes(self, members: Collection[int], pushers: Collection[int] | None = None) -> dict[str, int]:
        """Return the statistics of the job's pushes; `members`: the ranks that are left; `pushers`: see `short`."""
        servers = self.of_role("server")
        counts = self.push_counts()
        applied = self._applied(members)
        gone = [pusher for pusher in counts if int(pusher) not in members]
        return {
            "sent": sum(sent for sent, _ in counts.values()),
            "acknowledged": sum(acknowledged for _, acknowledged in counts.values()),
            "applied": sum(applied.values()),
            # At the end of the job: given up by strips when a rank was lost.
            "given_up": sum(sent - known for pusher, (sent, known) in counts.items() if pusher not in gone),
            # They are in the weights, and their pusher was lost before it could report that it knew.
            "unacknowledged_of_dead": sum(max(0, applied.get(pusher, 0) - counts[pusher][1]) for pusher in gone),
            "short": sum(self.short(members, pushers).values()),
            "duplicates": sum(report["duplicates"] for report in servers),
            "refused": sum(report["refused"] for report in servers),
            "bytes": sum(report["pushes"]["bytes"] for report in self.of_role("worker")),
        }

    def short(self, members: Collection[int], pushers: Collection[int] | None = None) -> dict[str, int]:
        """Return, by pusher, how many acknowledged pushes some shard lacks by the statistics; empty if all is well.

        For the end of the job, when all final reports are there. `members`: the ranks that are left; `pushers`: whose
        counts matter, or None for those of all ranks, lost ones too.
        """
        last = {pusher: known for pusher, (_, known) in self.push_counts().items()}
        last |= {str(report["rank"]): report["pushes"]["last"] for report in self.of_role("worker")}
        applied = self._applied(members)
        judged = [pusher for pusher in last if pushers is None or int(pusher) in pushers]
        missing = {pusher: last[pusher] - applied.get(pusher, 0) for pusher in judged}
        return {pusher: count for pusher, count in missing.items() if count > 0}

    def _applied(self, members: Collection[int]) -> dict[str, int]:
        """Return, by pusher, the last push that all shards have by the statistics of the servers in `members`."""
        return applied_pushes([report for report in self.of_role("server") if report["rank"] in members])

    def pulls(self) -> dict[str, int]:
        """Return the number of pulls and their bytes in the statistics of the whole job."""
        pulls = [report["pulls"] for report in self.of_role("worker")]
        return {"count": sum(pull["count"] for pull in pulls), "bytes": sum(pull["bytes"] for pull in pulls)}

    def workers(self) -> dict[str, WorkerTimes]:
        """Return each worker's statistics: images trained on and what its threads spent their time on."""
        return {
            str(report["rank"]): {
                "images": round(report["images"], 3),
                "busy": round(report["busy"], 3),
                "starved": round(report["starved"], 3),
                "clock_wait": round(report["clock_wait"], 3),
                "waits": {reason: round(seconds, 3) for reason, seconds in report["waits"].items()},
            }
            for report in self.of_role("worker")
        }

    def first_not_finite(self) -> dict[str, NotFiniteStatistics]:
        """Return, by rank, the first number that was not finite in each worker's statistics."""
        return {str(report["rank"]): report["trouble"] for report in self.of_role("worker") if report["trouble"]}

    def traffic(self) -> dict[str, int]:
        """Return the job's statistics of bytes by layer and protocol: "conv1 delta", "conv1 pull"."""
        total: Counter[str] = Counter()
        for report in self.of_role("worker"):
            total.update(report["traffic"])
        return dict(total)

    def cpu(self) -> dict[str, float]:
        """Return the statistics of CPU seconds by rank."""
        seconds = {rank: report.values["cpu"] for (_, rank), report in self.reports.items()}
        return {str(rank): round(seconds[rank], 3) for rank in sorted(seconds)}

    def clock_wait(self) -> float:
        """Return the statistics of the seconds in which clocks of others held back replicas, summed over all."""
        return round(sum(report["clock_wait"] for report in self.of_role("worker")), 3)

    def histogram(self, name: Literal["leads", "delays"]) -> Counter[int]:
        """Return the histogram `name` in the statistics of all servers together."""
        total: Counter[int] = Counter()
        for report in self.of_role("server"):
            total.update({int(value): count for value, count in report[name].items()})
        return total

    def distribution(self, name: Literal["leads", "delays"]) -> Distribution:
        """Return the histogram `name` in the statistics of all servers, with its maximum and mean."""
        return distribution(self.histogram(name))
