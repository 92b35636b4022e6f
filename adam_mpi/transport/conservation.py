"""Conservation, for tests of what a failure may lose: every push adds exactly 1 to every parameter.

In the end each weight is the number of pushes that were applied to it, whatever the program's own counters say. What
was pushed and what was acknowledged is counted outside of them too, by files that grow by a byte: they survive a kill.
Every server leaves what its copies of shards have come to, those it served and those it kept for others.

Files in the folder `conservation` of the run, where MEMBER is the number for life of a rank:

    pushed-MEMBER          a byte for every push begun
    acknowledged-MEMBER    a byte for every push that all servers have acknowledged
    given_up-MEMBER        a byte for every push that was taken back: of a clock that is computed again, or of a strip
    encoded-MEMBER         of a codec with error feedback: every message as it was encoded, written before it is sent;
                           a record is RECORD, then `words` words of its body; -1 words: that message is taken back
    carried-MEMBER-N.h5    of such a codec: the residual of the pusher's N-th life at its end, in steps and without what
                           `unsettle` put into it, by the shard's start in the flat vector; a rank that is killed leaves
                           none, but its messages tell
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
TAKEN_BACK = -1


class FactorArrays(Protocol):
    """Activations and errors of the first `count` images of a dense layer."""

    activations: np.ndarray
    errors: np.ndarray
    count: int


class Replaceable(Protocol):
    """A gradient that is about to be pushed, and that conservation replaces."""

    values: np.ndarray

    @property
    def factors(self) -> Mapping[str, FactorArrays]: ...


class Conservation:
    def __init__(self, directory: Path, member: int, batch: int) -> None:
        """`batch`: what servers divide gradients by; the learning rate is to be 1, and constant."""
        self.batch, self.count, self.member = batch, 0, member
        self.folder = directory / "conservation"
        self.folder.mkdir(exist_ok=True)
        self.life = len(list(self.folder.glob(f"carried-{member:05d}-*.h5")))
        self.pushes, self.acknowledgements, self.taken_back, self.messages = (
            os.open(self.folder / f"{name}-{member:05d}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            for name in ("pushed", "acknowledged", "given_up", "encoded")
        )

    def pushed(self, contribution: Replaceable) -> None:
        """Put the gradient of a step by 1 in the place of the real one.

        Factors may travel in several messages, some images in each: one image has all of the step, so that a message
        adds 1 or nothing, and another one in every push, so that none could be lost unseen.
        """
        contribution.values[:] = -self.batch
        for factors in contribution.factors.values():
            factors.activations[: factors.count] = 1
            factors.errors[: factors.count] = 0
            factors.errors[self.count % max(1, factors.count)] = -self.batch
        self.count += 1
        os.write(self.pushes, b".")

    def acknowledged(self) -> None:
        os.write(self.acknowledgements, b".")

    def given_up(self) -> None:
        """Note that a push is taken back."""
        os.write(self.taken_back, b".")

    def encoded(self, sequence: int, shard: Shard, codec: int, words: np.ndarray) -> None:
        """Note a message of a codec with error feedback, before it is sent."""
        record = np.array((sequence, shard.start, shard.size, codec, self.batch, words.size), RECORD)
        os.write(self.messages, record.tobytes() + words.tobytes())

    def decoded(self, sequence: int, shard: Shard) -> None:
        """Note that a message is taken back: no server has it, and the residual is as it was before."""
        record = np.array((sequence, shard.start, shard.size, 0, self.batch, TAKEN_BACK), RECORD)
        os.write(self.messages, record.tobytes())

    def leave(self, shards: Sequence[Shard], residual: Mapping[int, np.ndarray]) -> None:
        """Write what the codec carries when the pusher ends; `residual` by the shard's index."""
        path = self.folder / f"carried-{self.member:05d}-{self.life}.h5"
        part = path.with_suffix(".part")
        with h5py.File(part, "w") as file:
            for shard in shards:
                file[str(shard.start)] = residual[shard.index] / np.float32(-self.batch) - self._uneven(shard)
        part.rename(path)

    def unsettle(self, shards: Sequence[Shard], residual: Mapping[int, np.ndarray]) -> None:
        """Begin with an uneven residual: of gradients that are all alike some codecs would leave nothing out."""
        for shard in shards:
            residual[shard.index][:] += self._uneven(shard) * np.float32(-self.batch)

    @staticmethod
    def _uneven(shard: Shard) -> np.ndarray:
        """In steps."""
        return (np.arange(shard.start, shard.stop) % 7 - 3).astype(np.float32)


def leave_copies(folder: Path, member: int, copies: Mapping[int, np.ndarray]) -> None:
    """Of a server, in the end: the weights of its whole copies, by shard."""
    with h5py.File(folder / f"copies-{member:05d}.h5", "w") as file:
        for shard, weights in copies.items():
            file[str(shard)] = weights


def left_copies(directory: Path) -> dict[int, list[np.ndarray]]:
    """Shard -> the weights of all its copies."""
    found = defaultdict(list)
    for path in sorted((directory / "conservation").glob("copies-*.h5")):
        with h5py.File(path) as file:
            for shard, weights in file.items():
                found[int(shard)].append(weights[()])
    return found


def counted(directory: Path) -> dict[int, tuple[int, int]]:
    """Pushes that each pusher began, and those of them that were acknowledged."""
    folder = directory / "conservation"
    return {
        int(path.name.partition("-")[2]): (path.stat().st_size, _size(folder, path.name))
        for path in sorted(folder.glob("pushed-*"))
    }


def _size(folder: Path, name: str) -> int:
    return (folder / name.replace("pushed", "acknowledged")).stat().st_size


def given_up(directory: Path) -> dict[int, int]:
    """Pushes of each pusher that were taken back."""
    found = sorted((directory / "conservation").glob("given_up-*"))
    return {int(path.name.partition("-")[2]): path.stat().st_size for path in found}


def carried(directory: Path, dead: Collection[int] = ()) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (start in the flat vector, residual in steps) of what pushers carried at their ends, but for the dead."""
    for path in sorted((directory / "conservation").glob("carried-*.h5")):
        if int(path.name.split("-")[1]) not in dead:
            with h5py.File(path) as file:
                yield from ((int(start), values[()]) for start, values in file.items())


def encoded(directory: Path, member: int) -> dict[int, list[np.ndarray]]:
    """Return what each message of a pusher adds, in steps, in order, by the shard's start; not those taken back."""
    data = (directory / "conservation" / f"encoded-{member:05d}").read_bytes()
    place, found = 0, defaultdict[int, dict[int, np.ndarray]](dict)
    while place + RECORD.itemsize <= len(data):
        record = np.frombuffer(data, RECORD, 1, place)[0]
        body = place + RECORD.itemsize
        place = body + 4 * max(0, int(record["words"]))
        messages, sequence = found[int(record["start"])], int(record["sequence"])
        if record["words"] == TAKEN_BACK:
            messages.pop(sequence, None)
        elif place <= len(data):
            assert sequence not in messages, f"push {sequence} of rank {member} was encoded twice"
            messages[sequence] = np.empty(int(record["size"]), np.float32)
            BY_NUMBER[record["codec"]].decode(np.frombuffer(data[body:place], np.uint32), messages[sequence])
            messages[sequence] /= np.float32(-record["batch"])
    return {start: [values for _, values in sorted(kept.items())] for start, kept in found.items() if kept}


def unexplained(directory: Path, weights: np.ndarray, dead: Collection[int]) -> np.ndarray:
    """Return what is wrong with each weight of a run whose codec has error feedback; 0 where every push is in it once.

    Weights and what living pushers carry must be one for every push of theirs that was encoded, and what messages of
    the dead have added: those of acknowledged pushes, and some that follow, as nobody knows how far each shard has got.
    """
    told = counted(directory)
    members = {member: encoded(directory, member) for member in told}
    left = np.array(weights, np.float32)
    for start, values in carried(directory, dead):
        left[start : start + values.size] += values
    sizes = {start: values[0].size for messages in members.values() for start, values in messages.items()}
    for start, size in sizes.items():
        alive = sum(len(messages.get(start, ())) for member, messages in members.items() if member not in dead)
        lost = [member for member in members if member in dead and start in members[member]]
        gone = [_sums(members[member][start])[told[member][1] :] for member in lost]
        part = left[start : start + size]
        part[:] = min((part - alive - sum(chosen) for chosen in product(*gone)), key=lambda rest: np.abs(rest).max())
    return left


def _sums(messages: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Of none of them, the first, the first two, ..."""
    return list(np.cumsum([np.zeros_like(messages[0]), *messages], axis=0, dtype=np.float32))
