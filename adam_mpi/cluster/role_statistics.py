"""The statistics that the roles of a rank report to the coordinator, as typed dictionaries: they travel as JSON."""

from collections.abc import Mapping
from typing import Literal, TypedDict

Histogram = Mapping[int, int] | Mapping[str, int]
"""Value -> how often it was seen; JSON turns the values into text."""


class DataStatistics(TypedDict):
    """What a data rank reports."""

    role: Literal["data"]
    rank: int
    """The number that the rank keeps for the whole job."""
    cpu: float
    """CPU seconds of the process."""
    phase: int
    """Number of the phase that the next counts are about; -1 between phases."""
    finished: int
    """Images whose results have come back."""
    sums: list[float]
    """The sums of the loss and of the metrics over the finished images, where they are finite."""
    not_finite: int
    """Finished images whose loss was not finite."""
    done: bool
    owed: list[int]
    """Replica -> images of its share that are not finished."""
    skipped: int
    bad: list[str]
    """Images that cannot be used, such as "train 17"."""
    served: int
    """Images sent to workers."""
    bytes: int
    busy: float
    """Seconds of work so far."""
    queue: int
    """Batches that are ready."""
    preparing: int
    """Batches under way in its threads."""
    asks: int
    """Requests of workers that wait."""


class PushStatistics(TypedDict):
    """The pushes of a worker so far."""

    sent: int
    acknowledged: int
    bytes: int
    last: int
    """The number of its last acknowledged push, in the count of its strip."""


class PullStatistics(TypedDict):
    """The pulls of a worker so far."""

    count: int
    bytes: int


class LayerStatistics(TypedDict, total=False):
    """The norms of a layer, as a worker saw them last."""

    weight_norm: float
    gradient_norm: float
    dead: float
    """Fraction of its units that answer to no image; only where relu follows."""


class NotFiniteStatistics(TypedDict):
    """The first number of a worker that was not finite; see `Trouble` of the worker's diagnostics."""

    what: str
    layer: str
    step: int
    epoch: int
    batches: list[int]
    images: list[int]


class WorkerStatistics(TypedDict):
    """What a worker reports."""

    role: Literal["worker"]
    rank: int
    """The number that the rank keeps for the whole job."""
    cpu: float
    images: int
    """Images trained on."""
    busy: float
    """Seconds in which its threads computed, divided by their number."""
    starved: float
    """Seconds in which it waited for data."""
    clock_wait: float
    """Seconds in which it waited for the clocks of other replicas."""
    queue: int
    """Batches that have arrived."""
    unacknowledged: int
    pushes: PushStatistics
    carried: float | None
    """Length of what its codec has left out so far; None without error feedback."""
    left_behind: float
    """Length of what its codec had left out of the strips that it has no more."""
    pulls: PullStatistics
    traffic: dict[str, int]
    """Layer and protocol, such as "conv1 delta" -> bytes."""
    layers: dict[str, LayerStatistics]
    trouble: NotFiniteStatistics | None
    waits: dict[str, float]
    """What its threads waited for -> seconds."""
    whom: dict[str, list[int]]
    """What they waited for -> the ranks that could end the last such wait."""


class StoreStatistics(TypedDict):
    """The store of a server."""

    behind: float
    """Seconds since the oldest update that is not on disk."""
    bytes: int
    """Bytes written so far."""
    whole: bool
    """Whether every record has been written at least once."""


class ServerStatistics(TypedDict):
    """What a server reports."""

    role: Literal["server"]
    generation: int
    tables: list[tuple[str, int, int]]
    """(pusher, strip, the last of its pushes that every shard of that strip has)."""
    strips: list[int]
    """Strips that it serves shards of."""
    dropped: int
    """Pushes that it dropped as duplicates in this generation."""
    resumed_at: tuple[float | None, float | None]
    """When the first pusher, and when all of them, had a push applied in this generation."""
    rebuilt: int
    """Copies of shards that it has rebuilt on other servers."""
    rank: int
    """The number that the rank keeps for the whole job."""
    cpu: float
    applied: int
    duplicates: int
    refused: int
    torn: int
    too_stale: int
    steps: int
    folded: int
    """Pushes in those steps."""
    busy: float
    queue: int
    """Pushes that wait to be applied."""
    bytes: int
    """Bytes received."""
    rate: float
    """The learning rate."""
    rate_scale: float
    """What the scheduled learning rate is multiplied by."""
    clocks: Histogram
    """Pusher -> its clock."""
    leads: Histogram
    """Staleness of a push -> how many had it."""
    delays: Histogram
    """Updates that came between a push's pull and its application -> how many pushes had it."""
    shards: int
    parameters: int
    store: StoreStatistics | None


RoleStatistics = DataStatistics | WorkerStatistics | ServerStatistics
RoleName = Literal["data", "worker", "server"]
Reporter = tuple[str, int]
"""(role, number that the rank keeps for the whole job)."""
