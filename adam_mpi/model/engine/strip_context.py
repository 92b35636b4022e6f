"""Run a strip by the generated program: the parts of the program are the segments between exchanges."""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from adam_mpi.model.engine.context import EngineContext
from adam_mpi.model.engine.memory import Buffer
from adam_mpi.model.engine.program import Program
from adam_mpi.model.engine.segments import Crossing
from adam_mpi.model.exchange import Assembly
from adam_mpi.model.exchange_buffers import BACK, AssemblyBuffers, ExchangeBuffers, Port
from adam_mpi.model.partition import Strip
from adam_mpi.model.strip_context import Segment, set_image_edges


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
