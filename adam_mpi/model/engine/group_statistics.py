"""Emit statistics: moments of runs of numbers, and of channels over groups of samples that lie in several blocks.

Kernels that use groups are for all blocks of a pass; `values` are their first input.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.kernel import Kernel, Operand

PARTS = 4
"""Sums that are under way at once: one alone would wait for each addition."""


def emit_moments(kernel: Kernel, values: Operand, begin: str, size: int) -> None:
    """Emit `mean` and `variance`, lane by lane, of `size` numbers from the index `begin` on, in two passes."""
    width = min(PARTS, size)
    for name, term in (("mean", "add({sum}, {value})"), ("variance", "fma({off}, {off}, {sum})")):
        for part in range(width):
            kernel(f"sum{part} = zero()")
        for run in tiles.each(kernel.source, "k", tiles.runs(size, width)):
            for part in range(run.width):
                value = values.load(f"{begin} + k + {part}")
                if name == "variance":
                    kernel(f"off{part} = sub({value}, mean)")
                kernel(f"sum{part} = {term.format(sum=f'sum{part}', value=value, off=f'off{part}')}")
        whole_sum = "sum0"
        for part in range(1, width):
            whole_sum = f"add({whole_sum}, sum{part})"
        kernel(f"{name} = mul({whole_sum}, splat({1 / size!r}))")


@contextmanager
def each_group(kernel: Kernel, images: int) -> Iterator[None]:
    """Emit a loop over the groups of a pass: samples from `start` up to `stop`, in blocks from `low` up to `high`."""
    lanes = kernel.lanes
    kernel(f"limit = min(count, first + blocks * {lanes})")
    with kernel.inside(f"for start in range(first, limit, {images}):"):
        kernel(f"stop = min(start + {images}, limit)")
        kernel(f"low = (start - first) // {lanes}")
        kernel(f"high = (stop - first + {lanes - 1}) // {lanes}")
        yield


@contextmanager
def each_channel(kernel: Kernel) -> Iterator[None]:
    """Emit a loop over the channels of the values, which begin at `begin`."""
    value = kernel.inputs[0].value
    with kernel.loop("channel", value.shape[0]):
        kernel(f"begin = channel * {value.size // value.shape[0]}")
        yield


@contextmanager
def each_place(kernel: Kernel) -> Iterator[None]:
    """Emit a loop over the places of a channel; `index` is that of the number there."""
    value = kernel.inputs[0].value
    with kernel.loop("place", value.size // value.shape[0]):
        kernel("index = begin + place")
        yield


class GroupState:
    """Vectors of a group while it is summed up: `rows` per channel, how many samples lanes have had, and two masks."""

    def __init__(self, kernel: Kernel, channels: int, rows: int) -> None:
        self.kernel = kernel
        self.channels = channels
        self.rows = rows
        self.vectors = kernel.scratch("vectors", rows * channels * kernel.lanes)
        self.counts = kernel.scratch("counts", kernel.lanes)
        self.masks = kernel.scratch("masks", 2 * kernel.lanes)

    def _at(self, row: int) -> str:
        return f"{self.vectors} + (channel + {row * self.channels}) * {self.kernel.lanes}"

    def load(self, row: int) -> str:
        """Return the expression of the vector of `channel` in `row`."""
        return f"load(memory, {self._at(row)})"

    def store(self, row: int, vector: str) -> str:
        """Return the statement that stores the vector of `channel` in `row`."""
        return f"store(memory, {self._at(row)}, {vector})"

    def emit_clear(self) -> None:
        """Emit zeros for everything."""
        with self.kernel.loop("i", self.rows * self.channels):
            self.kernel(f"store(memory, {self.vectors} + i * {self.kernel.lanes}, zero())")
        self.kernel(f"store(memory, {self.counts}, zero())")

    @contextmanager
    def each_block_of_group(self) -> Iterator[None]:
        """Emit a loop over the blocks of a group; `chosen` is 1 in lanes of its samples.

        `given` is 1 in lanes without a sample too, if the group is the last one.
        """
        kernel = self.kernel
        with kernel.each_block("high", "low"):
            with kernel.each_lane():
                kernel(f"sample = first + block * {kernel.lanes} + lane")
                kernel(f"memory[{self.masks} + lane] = 1 if start <= sample < stop else 0")
                given = "start <= sample and (sample < stop or stop == count)"
                kernel(f"memory[{self.masks} + {kernel.lanes} + lane] = 1 if {given} else 0")
            kernel(f"chosen = load(memory, {self.masks})")
            kernel(f"given = load(memory, {self.masks} + {kernel.lanes})")
            yield

    def emit_given(self, output: Any, index: int | str, vector: str) -> None:
        """Emit `vector` as number `index` of `output` in the lanes of the group, and nothing in others."""
        self.kernel(output.store(index, f"equal(given, splat(1.0), {vector}, {output.load(index)})"))


def emit_join(kernel: Kernel, state: GroupState) -> None:
    """Emit, lane by lane, the moments of a block joined to those of the blocks before: means, and squares."""
    kernel(f"before = load(memory, {state.counts})")
    kernel("after = add(before, chosen)")
    kernel(f"store(memory, {state.counts}, after)")
    kernel("share = div(chosen, maximum(after, splat(1.0)))")
    with each_channel(kernel):
        emit_moments(kernel, kernel.inputs[0], "begin", kernel.inputs[0].value.size // state.channels)
        kernel(f"off = sub(mean, {state.load(0)})")
        kernel(state.store(0, f"fma(off, share, {state.load(0)})"))
        kernel("squares = fma(mul(off, off), mul(before, share), mul(chosen, variance))")
        kernel(state.store(1, f"add({state.load(1)}, squares)"))


def emit_combined(kernel: Kernel, state: GroupState) -> None:
    """Emit mean and variance over all lanes, in place of those of each."""
    kernel("samples = np.float32(stop - start)")
    kernel(f"counts_had = load(memory, {state.counts})")
    kernel(f"whole_mean = splat(total(mul(counts_had, {state.load(0)})) / samples)")
    kernel(f"off = sub({state.load(0)}, whole_mean)")
    kernel(f"squares = fma(mul(off, off), counts_had, {state.load(1)})")
    kernel(state.store(1, "splat(total(squares) / samples)"))
    kernel(state.store(0, "whole_mean"))
