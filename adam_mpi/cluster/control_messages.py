"""The control messages between ranks, one dataclass per kind, and the channel that sends and receives them."""

import json
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import numpy as np
from mpi4py import MPI


@dataclass(frozen=True)
class Message:
    """A control message; a subclass has a `kind` of its own, by which the receiver finds its class."""

    kind: ClassVar[str]
    classes: ClassVar[dict[str, type["Message"]]] = {}

    def __init_subclass__(cls) -> None:
        Message.classes[cls.kind] = cls


def encode_message(message: Message) -> bytes:
    """Return the control `message` as JSON."""
    return json.dumps({"kind": message.kind, **asdict(message)}).encode()


def decode_message(data: bytes) -> Message:
    """Return the control message that `data` holds; raise ValueError for a kind that no rank knows."""
    fields = json.loads(data)
    kind = fields.pop("kind", None)
    if kind not in Message.classes:
        raise ValueError(f"unknown control message {kind!r}; all ranks must run the same version of adam_mpi")
    return Message.classes[kind](**fields)


@dataclass(frozen=True)
class Statistics(Message):
    """What one role of a rank reports to the coordinator, from time to time and once more when it ends."""

    kind = "statistics"
    values: Mapping[str, Any]
    at: float | None = None
    """The sender's monotonic clock, in reports that come at intervals."""
    final: bool = False


@dataclass(frozen=True)
class BeginPhase(Message):
    """The coordinator begins a phase (its number, part and epoch); None ends the distribution of batches."""

    kind = "begin_phase"
    phase: list[Any] | None
    state: dict[str, Any] = field(default_factory=dict)
    """The coordinator's state, from which another rank continues if this one is lost."""


@dataclass(frozen=True)
class ClosePhase(Message):
    """Enough replicas have completed their shares: data ranks hand out no more batches of this phase."""

    kind = "close_phase"


@dataclass(frozen=True)
class StopTraining(Message):
    """The job stops on request: data ranks answer every further ask with a stop."""

    kind = "stop_training"


@dataclass(frozen=True)
class GoBack(Message):
    """Training has diverged: all ranks begin a new generation with the weights of a snapshot."""

    kind = "go_back"
    number: int
    """How often the run has gone back, this time included."""
    snapshots: list[str]
    """Names of the snapshots that may be used, the best first."""
    from_start: bool
    """Whether training may begin where the run began if none of them is whole."""
    learning_rate: float
    """The learning rate from then on."""
    rate_scale: float
    """Its ratio to the one that the run was begun with."""
    state: dict[str, Any]
    """The coordinator's state, from which another rank continues if this one is lost."""


@dataclass(frozen=True)
class HoldSnapshot(Message):
    """Servers and pushers hold for a snapshot and answer with SnapshotHeld."""

    kind = "hold_snapshot"
    role: str
    """The role of the receiver that is meant: server or worker."""


@dataclass(frozen=True)
class SnapshotHeld(Message):
    """How far each pusher has come where the sender holds."""

    kind = "snapshot_held"
    role: str
    clocks: list[int]


@dataclass(frozen=True)
class TakeSnapshot(Message):
    """Copy the state of just these clocks and write it into a folder; the answer is SnapshotWritten."""

    kind = "take_snapshot"
    role: str
    clocks: list[int]
    folder: str


@dataclass(frozen=True)
class SnapshotWritten(Message):
    """The sender's part of a snapshot is on disk, or could not be written."""

    kind = "snapshot_written"
    role: str
    values: dict[str, Any]


@dataclass(frozen=True)
class CompareCopies(Message):
    """Servers compare all copies of the shards they serve and answer with CopiesCompared."""

    kind = "compare_copies"


@dataclass(frozen=True)
class CopiesCompared(Message):
    """How many copies a server has compared, and how many of them differ from what it serves."""

    kind = "copies_compared"
    copies: int
    different: int


@dataclass(frozen=True)
class SetRateScale(Message):
    """Servers multiply the scheduled learning rate by `scale` and answer with their statistics."""

    kind = "set_rate_scale"
    scale: float


@dataclass(frozen=True)
class RemoveOldStores(Message):
    """Servers remove the stores of earlier attempts."""

    kind = "remove_old_stores"


@dataclass(frozen=True)
class FinishServer(Message):
    """Servers flush their stores and report their final statistics."""

    kind = "finish_server"
    copies: str | None
    """Folder into which a conservation run writes all copies of shards."""


@dataclass(frozen=True)
class SparesReport(Message):
    """How many spare processes of the sender are ready or starting, and how long those now ready took."""

    kind = "spares_report"
    ready: int
    coming: int
    refused: bool
    started: list[dict[str, float]]


@dataclass(frozen=True)
class Grow(Message):
    """Spare processes join: a new generation with `full` ranks begins."""

    kind = "grow"
    full: int


@dataclass(frozen=True)
class Spawn(Message):
    """The receiver starts `ranks` spare processes."""

    kind = "spawn"
    ranks: int


@dataclass(frozen=True)
class DumpStacks(Message):
    """The receiver logs the stacks of all its threads; `reason` says who waits for what."""

    kind = "dump_stacks"
    reason: str


@dataclass(frozen=True)
class SignOfLife(Message):
    """Ask for a sign of life, or give it."""

    kind = "sign_of_life"
    asks: bool
    number: int


@dataclass(frozen=True)
class JobOver(Message):
    """The results are written; all ranks end."""

    kind = "job_over"


@dataclass(frozen=True)
class ClockNorms(Message):
    """What one server has of the gradient of a clock of synchronous training, for the other servers."""

    kind = "clock_norms"
    server: int
    """The sender."""
    clock: int
    squares: list[float]
    """The squared norm of each tensor; empty if not everything is `finite`."""
    finite: bool


@dataclass(frozen=True)
class ClientClosed(Message):
    """A client of the ParameterServer library sends no more requests."""

    kind = "client_closed"


@dataclass(frozen=True)
class RankRaised(Message):
    """A rank of a program that uses the ParameterServer library raised an exception; all ranks end."""

    kind = "rank_raised"
    text: str


class ControlChannel:
    """Send and receive control messages over one communicator."""

    def __init__(self, comm: MPI.Comm) -> None:
        self.comm = comm
        # Buffers stay referenced until their request is complete.
        self.sending: list[tuple[MPI.Request, np.ndarray]] = []
        self.arriving: dict[int, deque[tuple[MPI.Request, np.ndarray]]] = defaultdict(deque)

    def send(self, message: Message, to: int) -> None:
        """Send the control `message` to rank `to`, without waiting for its arrival."""
        body = np.frombuffer(encode_message(message), np.uint8)
        self.sending.append((self.comm.Isend(body, to), body))

    def receive(self) -> Iterator[tuple[int, Message]]:
        """Yield (sender, message) for each control message that has arrived since the last call."""
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        status = MPI.Status()
        while (envelope := self.comm.Improbe(status=status)) is not None:
            body = np.empty(status.Get_count(MPI.BYTE), np.uint8)
            self.arriving[status.source].append((envelope.Irecv(body), body))
        # Messages of one sender are yielded in the order they were sent; one that is incomplete delays no other sender.
        for source, messages in self.arriving.items():
            while messages and messages[0][0].Test():
                _, body = messages.popleft()
                yield source, decode_message(body.tobytes())

    @property
    def idle(self) -> bool:
        """Return whether all sent control messages have left."""
        self.sending = [pair for pair in self.sending if not pair[0].Test()]
        return not self.sending
