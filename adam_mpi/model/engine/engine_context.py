"""Run the compiled program of a network or of a strip, in memory that belongs to one thread."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from adam_mpi.model.engine import tiles
from adam_mpi.model.engine.program import Program
from adam_mpi.model.engine.schedule import Buffer, Crossing
from adam_mpi.model.exchange import BACK, Assembly, AssemblyBuffers, ExchangeBuffers, Port
from adam_mpi.model.kernels import activations_and_loss
from adam_mpi.model.layers import Dropout, LayerShape
from adam_mpi.model.partition import Strip
from adam_mpi.model.reference_strip_context import Segment, set_image_edges

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
        self.levels = program.form.levels().ravel()
        self.pixels = np.zeros((images, *shapes[0].input), np.uint8 if program.form.bytes else np.float32)
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
        return self.outputs_of(len(pixels)).copy()

    def outputs_of(self, count: int) -> np.ndarray:
        """Return the probabilities of the `count` images of the last block, until the next one is computed."""
        return self.probabilities[:count]

    def factors(self, layer: str) -> tuple[np.ndarray, np.ndarray]:
        """Return activations and errors of the captured dense layer `layer` in the last block trained on.

        Both are (images, features).
        """
        activations, errors = self.kept[layer]
        last = slice(self.start, self.start + self.count)
        return activations[last], errors[last]

    def load_batch(self, pixels: np.ndarray, labels: np.ndarray) -> int:
        """Copy a block, so that the program sees one type of array whatever the block is a view of; return its size."""
        # Raises TypeError for floats where bytes are expected, which would lose their fractions.
        np.copyto(self.pixels[: len(pixels)], pixels, casting="same_kind")
        self.labels[: len(labels)] = labels
        return len(labels)

    def draw_keys(self, ids: np.ndarray, epoch: int) -> None:
        """Draw the random keys of the images `ids` in `epoch`, if a layer needs them."""
        if self.random:
            self.ids[: len(ids)] = ids
            activations_and_loss.image_keys(self.seed, epoch, self.ids[: len(ids)], self.keys)

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


class EngineStripContext(EngineContext):
    """One block of images on its way through a strip; used as `StripContext` is."""

    def __init__(self, strip: Strip, images: int, seed: int, program: Program, run: Callable) -> None:
        super().__init__(strip.stack, images, seed, program, run)
        self.room = program.blocks * program.lanes
        self.own_room = program.own_blocks * program.lanes
        self.number = strip.number
        self.result = (0.0, 0)
        self.own_keys = np.zeros_like(self.keys)
        """Random keys of this rank's own images, in a hybrid replica."""
        self.own_count = 0
        """This rank's own images."""
        self.blocks = program.blocks
        """Blocks in use for the last batch."""
        self.weights = self.unused
        self.gradient = self.unused
        self.exchange_buffers = [self._exchange_buffers(strip.number, crossing) for crossing in program.crossings]
        self.training = self._segments(True)
        self.evaluating = self._segments(False)

    def begin(
        self,
        weights: np.ndarray,
        gradient: np.ndarray | None,
        pixels: np.ndarray,
        labels: np.ndarray,
        ids: np.ndarray,
        epoch: int,
        edges: Sequence[int] = (),
    ) -> list[Segment]:
        """Load a block and return the segments to run; the arguments are those of `StripContext.begin`."""
        self.count = self.load_batch(pixels, labels)
        self.own_count = len(pixels)
        set_image_edges(self.exchange_buffers, edges)
        self.blocks = -(-self.count // self.program.lanes)
        self.weights = weights
        self.result = (0.0, 0)
        if gradient is None:
            return self.evaluating
        self.gradient = gradient
        if not self.count:
            gradient[:] = 0
        self.draw_keys(ids, epoch)
        if edges:
            self.own_keys[: self.own_count] = self.keys[edges[self.number] : edges[self.number + 1]]
        return self.training

    def _segments(self, training: bool) -> list[Segment]:
        """Return the segments of training or evaluation: the parts of the program between exchanges."""
        segments = [Segment()]
        port = None
        for number, part in enumerate(self.program.parts):
            if part.training and not training:
                break
            work = partial(self._part, number, training)
            if part.meanwhile:
                segments[-1].meanwhile.append(work)
                continue
            if port is not None:
                self._end(segments, port)
            segments[-1].work.append(work)
            port = part.port
        return segments

    def _end(self, segments: list[Segment], port: Port) -> None:
        """End the last segment with the exchange at `port`.

        Errors of the loss are known to all strips: each takes its own, without an exchange.
        """
        buffers = self.exchange_buffers[port.exchange]
        if port.direction == BACK and not buffers.exchange.summed:
            segments[-1].work.append(partial(buffers.unpack, BACK, {}))
            return
        segments[-1].port = port
        segments.append(Segment())

    def _part(self, number: int, training: bool) -> None:
        """Run part `number` of the program."""
        own = self.program.parts[number].own
        loss, correct = self.run_part(
            number,
            self.weights,
            self.gradient,
            self.own_count if own else self.count,
            training=training,
            overwrite=True,
            keys=self.own_keys if own else self.keys,
        )
        self.result = self.result[0] + loss, self.result[1] + correct

    def _exchange_buffers(self, strip: int, crossing: Crossing) -> ExchangeBuffers | AssemblyBuffers:
        """Return the buffers on both sides of `crossing`, as views of memory."""
        exchange = crossing.exchange
        buffers = crossing.owned, crossing.needed, crossing.owned_errors, crossing.needed_errors
        if isinstance(exchange, Assembly):
            counts = (self.program.own_blocks, self.program.blocks) * 2
            arrays = (self._array(buffer, 1, count)[:, 0] for buffer, count in zip(buffers, counts, strict=True))
            return AssemblyBuffers(exchange, strip, *arrays)
        # Errors that no layer needs have no place.
        blocks = self.program.blocks
        return ExchangeBuffers(exchange, strip, *(self._array(buffer, exchange.lines, blocks) for buffer in buffers))

    def _array(self, buffer: Buffer, lines: int, blocks: int) -> np.ndarray:
        """Return a view of `buffer`, (blocks, lines, places, lanes)."""
        place = self.program.places.get(buffer)
        lanes = self.program.lanes
        shape = (blocks, lines, buffer.floats // lines // lanes, lanes)
        if place is None:
            return np.zeros(shape, np.float32)
        return self.memory[place : place + blocks * buffer.floats].reshape(shape)
