"""Conservation, for tests of what a failure may lose: every push adds exactly 1 to every parameter.

In the end each weight is the number of pushes that were applied to it, whatever the program's own counters say. What
was pushed and what was acknowledged is counted outside of them too, by files that grow by a byte: they survive a kill.
Every server leaves what its copies of shards have come to, those it served and those it kept for others.
"""

import os
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np

from adam_mpi.worker.contribution import Contribution


class Conservation:
    def __init__(self, directory: Path, member: int, batch: int) -> None:
        """`batch`: what servers divide gradients by; the learning rate is to be 1, and constant."""
        self.batch, self.count = batch, 0
        folder = directory / "conservation"
        folder.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.pushes = os.open(folder / f"pushed-{member:05d}", flags)
        self.acknowledgements = os.open(folder / f"acknowledged-{member:05d}", flags)

    def pushed(self, contribution: Contribution) -> None:
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

