"""Conservation, for tests of what a failure may lose: every push adds exactly 1 to every parameter.

In the end each weight is the number of pushes that were applied to it, whatever the program's own counters say. What
was pushed and what was acknowledged is counted outside of them too, by files that grow by a byte: they survive a kill.
"""

import os
from pathlib import Path

from adam_mpi.worker.contribution import Contribution


class Conservation:
    def __init__(self, directory: Path, member: int, batch: int) -> None:
        """`batch`: what servers divide gradients by; the learning rate is to be 1, and constant."""
        self.batch = batch
        folder = directory / "conservation"
        folder.mkdir(exist_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        self.pushes = os.open(folder / f"pushed-{member:05d}", flags)
        self.acknowledgements = os.open(folder / f"acknowledged-{member:05d}", flags)

    def pushed(self, contribution: Contribution) -> None:
        """Put the gradient of a step by 1 in the place of the real one."""
        contribution.values[:] = -self.batch
        for factors in contribution.factors.values():
            factors.activations[: factors.count] = 1
            factors.errors[: factors.count] = -self.batch / max(factors.count, 1)
        os.write(self.pushes, b".")

    def acknowledged(self) -> None:
        os.write(self.acknowledgements, b".")


def counted(directory: Path) -> dict[int, tuple[int, int]]:
    """Pushes that each pusher began, and those of them that were acknowledged."""
    folder = directory / "conservation"
    return {
        int(path.name.partition("-")[2]): (path.stat().st_size, _size(folder, path.name))
        for path in sorted(folder.glob("pushed-*"))
    }


def _size(folder: Path, name: str) -> int:
    return (folder / name.replace("pushed", "acknowledged")).stat().st_size

