"""The losses that a job has survived, and how long it took until pushes were applied again."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from adam_mpi.cluster.layout import Place
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.runtime.recovery import RecoveryPlan, earliest


@dataclass(frozen=True)
class Recovery:
    """One change of the membership, as the summary reports it."""

    generation: int
    dead: list[str]
    """The places of the ranks that were lost; none when ranks joined."""
    members: list[int]
    """Their member numbers."""
    detected: float
    """When the first rank noticed, in seconds since 1970."""
    seconds: float | None = None
    """How long it took until a push of any pusher was applied; None before that."""
    seconds_all: float | None = None
    """How long it took until pushes of all pushers were applied; None before that."""
    promoted: int = 0
    """Shards that another server serves since."""
    rebuilt: int = 0
    """Copies of shards that were sent to other servers."""
    resent: int = 0
    lost: int = 0
    """Pushes of the lost ranks that were not acknowledged."""
    duplicates: int = 0
    """Pushes that were sent again and had been applied already."""

    def ended_at(self, any_pusher: float | None, all_pushers: float | None) -> "Recovery":
        """Return the logged recovery with the durations that end at these times, where not known yet."""
        seconds = self.seconds
        if seconds is None and any_pusher:
            seconds = round(any_pusher - self.detected, 3)
        seconds_all = self.seconds_all
        if seconds_all is None and all_pushers:
            seconds_all = round(all_pushers - self.detected, 3)
        return replace(self, seconds=seconds, seconds_all=seconds_all)


@dataclass
class RecoveryLog:
    """The recoveries of a job up to one generation; the last of them may still be going on."""

    generation: int
    statistics: JobStatistics
    recoveries: list[Recovery] = field(default_factory=list)

    def resume(self, recoveries: Sequence[dict[str, Any]], resumed_at: tuple[float | None, float | None]) -> None:
        """Continue the recovery log of the coordinator before; `resumed_at`: when it applied pushes again.

        A generation that ended before its first push is part of the next recovery.
        """
        self.recoveries = [Recovery(**values).ended_at(*resumed_at) for values in recoveries]

    def add(self, plan: RecoveryPlan, gone: Sequence[Place]) -> None:
        """Add the recovery with which this generation begins to the log: the ranks of `gone` are lost."""
        pushes = self.statistics.push_counts()
        counts = [pushes[str(place.member)] for place in gone if str(place.member) in pushes]
        recovery = Recovery(
            generation=self.generation,
            dead=[str(place) for place in gone],
            members=[place.member for place in gone],
            detected=plan.detected,
            promoted=plan.promoted,
            resent=plan.resent,
            lost=sum(sent - acknowledged for sent, acknowledged in counts),
        )
        self.recoveries.append(recovery)

    def current(self) -> list[Recovery]:
        """Return all recoveries, with what servers have reported since the last of them."""
        servers = self.statistics.of_role("server")
        reports = [report for report in servers if report.get("generation") == self.generation]
        if not self.recoveries or not reports:
            return self.recoveries
        times = earliest(report["resumed_at"] for report in reports)
        *earlier, last = (recovery.ended_at(*times) for recovery in self.recoveries)
        rebuilt = sum(report["rebuilt"] for report in reports)
        duplicates = sum(report["dropped"] for report in reports)
        return [*earlier, replace(last, rebuilt=rebuilt, duplicates=duplicates)]

    def to_json(self) -> list[dict[str, Any]]:
        """Return all recoveries as values for the summary and for the next coordinator."""
        return [asdict(recovery) for recovery in self.current()]

    @property
    def in_progress(self) -> bool:
        """Return whether a recovery is in progress: no push has been applied since the last loss."""
        return bool(self.recoveries) and self.current()[-1].seconds is None
