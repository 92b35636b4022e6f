"""A context of the generated engine: the memory one thread works in, and the compiled program."""

from collections.abc import Callable, Sequence

import numpy as np

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.program import Program
from adam_mpi.model.kernels import dropout
from adam_mpi.model.layers import Dropout, LayerShape

ALIGNMENT = 64


class EngineContext:
    """Trains or evaluates blocks of up to `images` images; one thread at a time may use it.

    `weights` is read in place and may be changed by others meanwhile; so is `shared`, which has the layers that are too
    large for a copy per thread. Without, they too are read in `weights`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        images: int,
        seed: int,
        program: Program,
        run: Callable,
        shared: np.ndarray | None = None,
        settle_run: Callable | None = None,
    ) -> None:
        self.seed, self.run, self.program, self.shared = seed, run, program, shared
        self.settle_run = settle_run
        self.random = any(isinstance(shape.layer, Dropout) for shape in shapes)
        self.classes = shapes[-1].output[0]
        self.memory = aligned(program.floats)
        self.levels = (np.arange(256) / 255).astype(np.float32)
        self.pixels = np.zeros((images, *shapes[0].input), np.uint8)
        self.labels, self.ids = np.zeros(images, np.int64), np.zeros(images, np.int64)
        self.keys = np.zeros(images + program.lanes, np.uint64)
        self.probabilities = np.zeros((images, self.classes), np.float32)
        self.unused = np.zeros(1, np.float32)
        self.count = self.start = self.end = 0
        """Images of the last batch, and where it lies among those of its round: from `start` to `end`, whole blocks."""
        room = program.batches * tiles.up(images, program.lanes)
        self.kept = {
            shape.name: [
                _rows(self.memory, room, columns, *place)
                for columns, place in zip(reversed(shape.weight or ()), program.kept[shape.name], strict=True)
            ]
            for shape in shapes
            if shape.name in program.kept
        }
        """Views of activations and errors, (images, features) each."""

    def train(
        self,
        weights: np.ndarray,
        gradient: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
        ids: np.ndarray,
        epoch: int,
        overwrite: bool = False,
        later: bool = False,
    ) -> tuple[float, int]:
        """Add the sum of the block's gradients to `gradient`, or overwrite it; return loss sum and number correct.

        `later`: large layers (`program.settled`) have to wait for `settle`, and their gradient is not written.
        """
        self.draw(ids, epoch)
        self.count, self.start = len(pixels), self.end if later else 0
        result = self._run(True, overwrite, weights, gradient, pixels, labels, later)
        self.end = self.start + tiles.up(len(pixels), self.program.lanes)
        return result

    def settle(self, contribution: np.ndarray, factor: float, unit: float) -> None:
        """Step on the large layers: `unit` times their gradient is added to the contribution, `factor` times it taken
        off the shared weights. That ends a round.
        """
        if self.settle_run and self.end:
            blocks, factors = self.end // self.program.lanes, (np.float32(factor), np.float32(unit))
            self.settle_run(self.shared, contribution, self.memory, blocks, *factors)
        self.end = 0

    def evaluate(self, weights: np.ndarray, pixels: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        """The loss sum and the number correct, without dropout."""
        return self._run(False, False, weights, self.unused, pixels, labels)

    def predict(self, weights: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        """Probabilities (images, classes)."""
        self._run(False, False, weights, self.unused, pixels, np.zeros(len(pixels), np.int64))
        return self.probabilities[: len(pixels)].copy()

    def factors(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Activations and errors of a captured dense layer in the last block trained on, (images, features) each."""
        activations, errors = self.kept[layer]
        last = slice(self.start, self.start + self.count)
        return activations[last], errors[last]

    def _run(
        self,
        training: bool,
        overwrite: bool,
        weights: np.ndarray,
        gradient: np.ndarray,
        pixels: np.ndarray,
        labels: np.ndarray,
        later: bool = False,
    ) -> tuple[float, int]:
        # Copied only if they are not such an array already.
        weights = np.require(weights, np.float32, ["C", "A", "W"])
        count = self.take(pixels, labels)
        return self.call(0, training, overwrite, later, weights, gradient, count)

    def take(self, pixels: np.ndarray, labels: np.ndarray) -> int:
        """Copy a block, so that the program sees one type of array whatever the block is a view of."""
        self.pixels[: len(pixels)] = pixels
        self.labels[: len(labels)] = labels
        return len(labels)

    def draw(self, ids: np.ndarray, epoch: int) -> None:
        """The random keys of these images in this epoch."""
        if self.random:
            self.ids[: len(ids)] = ids
            dropout.image_keys(self.seed, epoch, self.ids[: len(ids)], self.keys)

    def call(
        self,
        part: int,
        training: bool,
        overwrite: bool,
        later: bool,
        weights: np.ndarray,
        gradient: np.ndarray,
        count: int,
        keys: np.ndarray | None = None,
    ) -> tuple[float, int]:
        """The compiled program, on the block that was taken; `keys`: where they are not those of all its images."""
        return self.run(
            part,
            training,
            overwrite,
            later,
            self.start,
            weights,
            weights if self.shared is None else self.shared,
            gradient,
            self.memory,
            self.levels,
            self.pixels.reshape(-1),
            self.labels,
            self.keys if keys is None else keys,
            self.probabilities.reshape(-1),
            count,
        )


def _rows(memory: np.ndarray, images: int, columns: int, place: int, apart: int) -> np.ndarray:
    return memory[place : place + images * apart].reshape(images, apart)[:, :columns]


def aligned(floats: int) -> np.ndarray:
    """Zeros that begin with a cache line."""
    memory = np.zeros(4 * floats + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + 4 * floats].view(np.float32)
