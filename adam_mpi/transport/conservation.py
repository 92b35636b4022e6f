"""Test instrumentation: makes every push add exactly 1 to every parameter, and records pushes outside the program.

No job uses it but those of tests (`inject.conserve`). At the end of such a job each weight is the number of pushes that
were applied to it, whatever the program's own counters say. A test compares it with the pushes that were begun and
acknowledged, which are recorded by files that grow by a byte, because files survive a kill. Every server also writes
the weights of its shard copies, those it served and those it kept for others.

Files in the folder `conservation` of the run, where MEMBER is the member number of a rank:

    pushed-MEMBER          a byte for every push begun
    acknowledged-MEMBER    a byte for every push that all servers have acknowledged
    withdrawn-MEMBER       a byte for every push that was withdrawn: of a clock that is computed again, or of a strip
    messages-MEMBER        with a codec that has error feedback: every message as it was encoded, before it is sent;
                           a record is RECORD, then `words` words of its body; -1 words: that message is withdrawn
    residual-MEMBER-N.h5   with such a codec: the residual when the pusher ended for the N-th time, in pushes and
                           without what was added to it at the start, by the shard's start in the flat vector; a rank
                           that is killed writes none, but its messages are there
    copies-MEMBER.h5       of a server: the weights of its whole copies, by shard
"""

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Protocol

import h5py
import numpy as np

from adam_mpi.sharding.codecs import BY_NUMBER
from adam_mpi.sharding.shards import Shard

RECORD = np.dtype([(name, "<i8") for name in ("sequence", "start", "size", "codec", "batch", "words")])
WITHDRAWN = -1


class FactorArrays(Protocol):
    """Activations and errors of the first `count` images of a dense layer."""

    activations: np.ndarray
    errors: np.ndarray
    count: int


class Replaceable(Protocol):
    """A gradient that is about to be pushed, and that is replaced."""

    values: np.ndarray

    @property
    def factors(self) -> Mapping[str, FactorArrays]: ...


class ConservationRecorder:
    """Replaces the gradients of one pusher, and records what becomes of its pushes."""

    def __init__(self, directory: Path, member: int, batch: int) -> None:
        """Record for servers that divide gradients by `batch`; the learning rate has to be 1, and constant."""
        self.batch = batch
        self.count = 0
        self.member = member
        self.folder = directory / "conservation"
        self.folder.mkdir(exist_ok=True)
        self.attempt = len(list(self.folder.glob(f"residual-{member:05d}-*.h5")))
        self.pushes = self._open("pushed")
        self.acknowledgements = self._open("acknowledged")
        self.withdrawals = self._open("withdrawn")
        self.messages = self._open("messages")

    def _open(self, name: str) -> int:
        """Return a descriptor that appends to the file `name` of this rank."""
        return os.open(self.folder / f"{name}-{self.member:05d}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def record_push(self, gradient: Replaceable) -> None:
        """Record a push, and replace its gradient by that of a step by 1.

        Factors may travel in several messages, with some images each: one image has all of the step, so that a message
        adds 1 or nothing, and another image in every push, so that no lost message could stay unnoticed.
        """
        gradient.values[:] = -self.batch
        for factors in gradient.factors.values():
            factors.activations[: factors.count] = 1
            factors.errors[: factors.count] = 0
            factors.errors[self.count % max(1, factors.count)] = -self.batch
        self.count += 1
        os.write(self.pushes, b".")

    def record_acknowledgement(self) -> None:
        """Record that a push is acknowledged by all servers."""
        os.write(self.acknowledgements, b".")

    def record_withdrawal(self) -> None:
        """Record that a push is withdrawn."""
        os.write(self.withdrawals, b".")

    def record_message(self, sequence: int, shard: Shard, codec: int, words: np.ndarray) -> None:
        """Record a message of a codec with error feedback, before it is sent."""
        record = np.array((sequence, shard.start, shard.size, codec, self.batch, words.size), RECORD)
        os.write(self.messages, record.tobytes() + words.tobytes())

    def withdraw_message(self, sequence: int, shard: Shard) -> None:
        """Record that a message is withdrawn: no server has it, and the residual is as it was before."""
        record = np.array((sequence, shard.start, shard.size, 0, self.batch, WITHDRAWN), RECORD)
        os.write(self.messages, record.tobytes())

    def write_residual(self, shards: Sequence[Shard], residual: Mapping[int, np.ndarray]) -> None:
        """Write the residual of the codec when the pusher ends; `residual` by the shard's index."""
        path = self.folder / f"residual-{self.member:05d}-{self.attempt}.h5"
        part = path.with_suffix(".part")
        with h5py.File(part, "w") as file:
            for shard in shards:
                file[str(shard.start)] = residual[shard.index] / np.float32(-self.batch) - _uneven(shard)
        part.rename(path)

    def perturb_residual(self, shards: Sequence[Shard], residual: Mapping[int, np.ndarray]) -> None:
        """Add uneven values to the residual at the start: some codecs would leave nothing out of equal gradients."""
        for shard in shards:
            residual[shard.index][:] += _uneven(shard) * np.float32(-self.batch)


def _uneven(shard: Shard) -> np.ndarray:
    """Return what is added to the residual of `shard` at the start, in pushes."""
    return (np.arange(shard.start, shard.stop) % 7 - 3).astype(np.float32)


def write_copies(folder: Path, member: int, copies: Mapping[int, np.ndarray]) -> None:
    """Write the weights of the whole copies of a server, by shard, at the end."""
    with h5py.File(folder / f"copies-{member:05d}.h5", "w") as file:
        for shard, weights in copies.items():
            file[str(shard)] = weights


def read_copies(directory: Path) -> dict[int, list[np.ndarray]]:
    """Return shard -> the weights of all its copies."""
    found = defaultdict(list)
    for path in sorted((directory / "conservation").glob("copies-*.h5")):
        with h5py.File(path) as file:
            for shard, weights in file.items():
                found[int(shard)].append(weights[()])
    return found


def count_pushes(directory: Path) -> dict[int, tuple[int, int]]:
    """Return pusher -> how many pushes it began, and how many of them were acknowledged."""
    pushed = _count_bytes(directory, "pushed")
    acknowledged = _count_bytes(directory, "acknowledged")
    return {member: (count, acknowledged[member]) for member, count in pushed.items()}


def count_withdrawn(directory: Path) -> dict[int, int]:
    """Return pusher -> how many of its pushes were withdrawn."""
    return _count_bytes(directory, "withdrawn")


def _count_bytes(directory: Path, name: str) -> dict[int, int]:
    """Return the size of the file `name` of each rank."""
    found = sorted((directory / "conservation").glob(f"{name}-*"))
    return {int(path.name.partition("-")[2]): path.stat().st_size for path in found}


def read_residuals(directory: Path, dead: Collection[int] = ()) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (start in the flat vector, residual in pushes) of all pushers but the `dead`, when each ended."""
    for path in sorted((directory / "conservation").glob("residual-*.h5")):
        if int(path.name.split("-")[1]) not in dead:
            with h5py.File(path) as file:
                yield from ((int(start), values[()]) for start, values in file.items())


def read_messages(directory: Path, member: int) -> dict[int, list[np.ndarray]]:
    """Return start of a shard -> what each message of `member` adds, in pushes, in order, without withdrawn ones."""
    data = (directory / "conservation" / f"messages-{member:05d}").read_bytes()
    place = 0
    found = defaultdict[int, dict[int, np.ndarray]](dict)
    while place + RECORD.itemsize <= len(data):
        record = np.frombuffer(data, RECORD, 1, place)[0]
        body = place + RECORD.itemsize
        place = body + 4 * max(0, int(record["words"]))
        messages = found[int(record["start"])]
        sequence = int(record["sequence"])
        if record["words"] == WITHDRAWN:
            messages.pop(sequence, None)
        elif place <= len(data):
            assert sequence not in messages, f"push {sequence} of rank {member} was encoded twice"
            messages[sequence] = np.empty(int(record["size"]), np.float32)
            BY_NUMBER[record["codec"]].decode(np.frombuffer(data[body:place], np.uint32), messages[sequence])
            messages[sequence] /= np.float32(-record["batch"])
    return {start: [values for _, values in sorted(kept.items())] for start, kept in found.items() if kept}


def unexplained_weights(directory: Path, weights: np.ndarray, dead: Collection[int]) -> np.ndarray:
    """Return by how much each weight of a run with error feedback is wrong, in pushes; 0 if it has every push once.

    Weights and the residuals of living pushers must be one for every push of theirs that was encoded, plus what
    messages of the dead have added: those of acknowledged pushes, and some that follow, because nobody knows how many
    each shard has.
    """
    counts = count_pushes(directory)
    members = {member: read_messages(directory, member) for member in counts}
    left = np.array(weights, np.float32)
    for start, values in read_residuals(directory, dead):
        left[start : start + values.size] += values
    sizes = {start: values[0].size for messages in members.values() for start, values in messages.items()}
    for start, size in sizes.items():
        alive = sum(len(messages.get(start, ())) for member, messages in members.items() if member not in dead)
        lost = [member for member in members if member in dead and start in members[member]]
        possible = [_partial_sums(members[member][start])[counts[member][1] :] for member in lost]
        part = left[start : start + size]
        rests = (part - alive - sum(chosen) for chosen in product(*possible))
        part[:] = min(rests, key=lambda rest: np.abs(rest).max())
    return left


def _partial_sums(messages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return the sums of no message, of the first one, of the first two, ..."""
    return list(np.cumsum([np.zeros_like(messages[0]), *messages], axis=0, dtype=np.float32))
