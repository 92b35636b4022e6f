"""One call of the kernels for the steps of many runs of parameters: Python is slow between kernels, as caches cool."""

from collections.abc import Sequence

import numpy as np

from adam_mpi.optimizer import kernels
from adam_mpi.server.message_values import kernel_messages


class KernelCall:
    """Collects the runs of parameters that one call of the kernels steps."""

    def __init__(self, kernel: int) -> None:
        self.kernel = kernel
        self.places: list[int] = []
        """The numbers of each `Place`, one after the other."""
        self.ends: list[int] = []
        self.starts: list[int] = []
        self.scales: list[float] = []
        self.row_ends: list[int] = []
        self.rows: list[np.ndarray] = []
        self.count = 0
        """The number of rows of coefficients."""
        self.others: dict[int, KernelCall] = {}

    def of_kernel(self, kernel: int) -> "KernelCall":
        """Return the call of another `kernel`, which runs after this one; or this one, if the kernel is its own."""
        return self if kernel == self.kernel else self.others.setdefault(kernel, KernelCall(kernel))

    def add(
        self, place: kernels.Place, starts: Sequence[int], scales: Sequence[float], rows: Sequence[np.ndarray]
    ) -> None:
        """Add a run at `place`: a row of coefficients for the sum of the gradients at `starts`, or one for each."""
        count = len(rows[0]) if len(rows) == 1 else sum(map(len, rows))
        if not count:
            return
        self.places += place
        self.starts += starts
        self.scales += scales
        self.rows += rows
        self.count += count
        self.ends.append(len(self.starts))
        self.row_ends.append(self.count)

    def run(self, memory: np.ndarray) -> None:
        """Take the steps; the gradients lie in `memory`."""
        if self.ends:
            kernels.steps(
                self.kernel,
                np.array(self.places, np.int64).reshape(-1, 4),
                memory,
                np.array(self.ends),
                *kernel_messages(self.starts, self.scales),
                np.array(self.row_ends),
                np.concatenate(self.rows),
            )
        for other in self.others.values():
            other.run(memory)
