"""Run the compiled program of the generated engine, in memory that belongs to one thread."""

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
    large for a copy per thread. Without `shared` they too are read in `weights`. `run` and `run_fused` are the compiled
    functions of `program`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        images: int,
        seed: int,
        program: Program,
        run: Callable,
        shared: np.ndarray | None = None,
        run_fused: Callable | None = None,
    ) -> None:
        self.seed = seed
        self.run = run
        self.run_fused = run_fused
        self.program = program
        self.shared = shared
        self.random = any(isinstance(shape.layer, Dropout) for shape in shapes)
        self.classes = shapes[-1].output[0]
        self.memory = aligned(program.floats)
        self.levels = (np.arange(256) / 255).astype(np.float32)
        self.pixels = np.zeros((images, *shapes[0].input), np.uint8)
        self.labels = np.zeros(images, np.int64)
        self.ids = np.zeros(images, np.int64)
        self.keys = np.zeros(images + program.lanes, np.uint64)
        self.probabilities = np.zeros((images, self.classes), np.float32)
        self.unused = np.zeros(1, np.float32)
        self.count = 0
        """Images of the last batch."""
        self.start = 0
        self.end = 0
        """The last batch lies from `start` to `end` among the images of its round, in whole blocks."""
        self.kept = self._kept(shapes, images)
        """Views of activations and errors of captured layers, (images, features) each."""

    def _kept(self, shapes: Sequence[LayerShape], images: int) -> dict[str, list[np.ndarray]]:
        program = self.program
        room = program.batches * tiles.up(images, program.lanes)
        return {
            shape.name: [
                _rows(self.memory, room, columns, *place)
                for columns, place in zip(reversed(shape.weight or ()), program.kept[shape.name], strict=True)
            ]
            for shape in shapes
            if shape.name in program.kept
        }

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

        `later`: the gradient of large layers (`program.fused_layers`) is not written; `apply_fused` applies it.
        """
        self.draw_keys(ids, epoch)
        self.count = len(pixels)
        self.start = self.end if later else 0
        count = self.load_batch(pixels, labels)
        result = self.run_part(0, _usable(weights), gradient, count, training=True, overwrite=overwrite, later=later)
        self.end = self.start + tiles.up(len(pixels), self.program.lanes)
        return result

    def apply_fused(self, contribution: np.ndarray, factor: float, unit: float) -> None:
        """Apply the fused update of large layers, which ends a round.

        `unit` times their gradient is added to `contribution`, `factor` times it subtracted from the shared weights.
        """
        if self.run_fused and self.end:
            blocks = self.end // self.program.lanes
            arrays = (self.shared, contribution, self.memory)
            self.run_fused(*arrays, blocks, np.float32(factor), np.float32(unit))
        self.end = 0

    def evaluate(self, weights: np.ndarray, pixels: np.ndarray, labels: np.ndarray) -> tuple[float, int]:
        """Return the loss sum and the number correct, without dropout."""
        count = self.load_batch(pixels, labels)
        return self.run_part(0, _usable(weights), self.unused, count)

    def predict(self, weights: np.ndarray, pixels: np.ndarray) -> np.ndarray:
        """Return the probabilities (images, classes)."""
        self.evaluate(weights, pixels, np.zeros(len(pixels), np.int64))
        return self.probabilities[: len(pixels)].copy()

    def factors(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Return activations and errors of the captured dense layer `layer` in the last block trained on.

        Both are (images, features).
        """
        activations, errors = self.kept[layer]
        last = slice(self.start, self.start + self.count)
        return activations[last], errors[last]

    def load_batch(self, pixels: np.ndarray, labels: np.ndarray) -> int:
        """Copy a block, so that the program sees one type of array whatever the block is a view of; return its size."""
        self.pixels[: len(pixels)] = pixels
        self.labels[: len(labels)] = labels
        return len(labels)

    def draw_keys(self, ids: np.ndarray, epoch: int) -> None:
        """Draw the random keys of the images `ids` in `epoch`, if a layer needs them."""
        if self.random:
            self.ids[: len(ids)] = ids
            dropout.image_keys(self.seed, epoch, self.ids[: len(ids)], self.keys)

    def run_part(
        self,
        part: int,
        weights: np.ndarray,
        gradient: np.ndarray,
        count: int,
        training: bool = False,
        overwrite: bool = False,
        later: bool = False,
        keys: np.ndarray | None = None,
    ) -> tuple[float, int]:
        """Run a part of the program on the block that was loaded; return loss sum and number correct.

        `keys` are given where they are not those of all images of the block.
        """
        # In the order of `entry.ARGUMENTS`.
        arguments = (
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
        return self.run(*arguments)


def _usable(weights: np.ndarray) -> np.ndarray:
    """Return `weights` as an array that compiled code takes; copied only if it is not one already."""
    return np.require(weights, np.float32, ["C", "A", "W"])


def _rows(memory: np.ndarray, images: int, columns: int, place: int, pitch: int) -> np.ndarray:
    """Return a view of rows `pitch` floats apart from `place` on, one per image, of `columns` floats each."""
    return memory[place : place + images * pitch].reshape(images, pitch)[:, :columns]


def aligned(floats: int) -> np.ndarray:
    """Return zeros that begin with a cache line."""
    memory = np.zeros(4 * floats + ALIGNMENT, np.uint8)
    offset = -memory.ctypes.data % ALIGNMENT
    return memory[offset : offset + 4 * floats].view(np.float32)
