"""The reference engine's context of a strip: its layers, cut at the exchanges into segments that run one by one."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.model import parameters
from adam_mpi.model.exchange import BACK, FORWARD, Assembly, AssemblyBuffers, Exchange, ExchangeBuffers, Port
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.partition import Strip
from adam_mpi.model.reference_context import Context
from adam_mpi.model.reference_steps import Place

Work = Callable[[], None]


@dataclass
class Segment:
    """The work up to an exchange; `meanwhile` may be computed during the exchange. The last segment has no port."""

    work: list[Work] = field(default_factory=list)
    meanwhile: list[Work] = field(default_factory=list)
    port: Port | None = None


class StripContext(Context):
    """Computes one block of images on a strip: call `begin`, then run the segments in order.

    Before a segment runs, what the exchange before it brings must be unpacked: see `ExchangeBuffers.unpack`.
    """

    def __init__(
        self, strip: Strip, images: int, seed: int, dtype: DTypeLike, form: InputFormat = SCALED_BYTES
    ) -> None:
        super().__init__(strip.stack, images, seed, dtype, form=form)
        self.stack = strip.stack
        self.number = strip.number
        self.room = images
        """Images that fit."""
        self.own_room = len(self.arrays["pixels"])
        """Own images that fit, before an assembly."""
        self.blocks = 1
        self.result = (0.0, 0)
        """Loss sum and number correct."""
        self.views: dict[str, np.ndarray] = {}
        self.gradients: dict[str, np.ndarray] = {}
        self.labels = self.arrays["labels"][:0]
        self.exchange_buffers: list[ExchangeBuffers | AssemblyBuffers] = [
            _buffers(shape.layer, strip.number, place)
            for shape, place in zip(self.stack, self.places, strict=True)
            if isinstance(shape.layer, Exchange)
        ]
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
        """Load a block; return the segments to run: up to the loss, and with a `gradient` the way back.

        The gradient is overwritten. In a hybrid replica `edges` are where the images of each rank begin and end among
        all images, which `labels` and `ids` are of; `pixels` are of the rank's own images.
        """
        self.views = parameters.views(weights, self.tensors)
        self.load(pixels)
        self.labels = labels
        self.count = len(labels)
        set_image_edges(self.exchange_buffers, edges)
        if gradient is None:
            return self.evaluating
        gradient[:] = 0
        self.gradients = parameters.views(gradient, self.tensors)
        self._draw(ids, epoch)
        if edges:
            own = self.arrays["keys"][edges[self.number] : edges[self.number + 1]]
            self.arrays["own keys"][: own.size] = own
        return self.training

    def _segments(self, training: bool) -> list[Segment]:
        """Return the segments of a block in training, or in evaluation."""
        segments = [Segment()]
        exchanges = 0
        for shape, step in zip(self.stack, self.steps, strict=True):
            if isinstance(shape.layer, Exchange):
                _end(segments, Port(exchanges, FORWARD))
                exchanges += 1
            else:
                segments[-1].work.append(self._forward(step.forward if training else step.inference))
        segments[-1].work.append(self._end)
        if training:
            self._add_backward(segments, exchanges)
        return segments

    def _add_backward(self, segments: list[Segment], exchanges: int) -> None:
        """Add the way back through `exchanges` exchanges to the first layer with weights.

        What other strips wait for comes before the strip's own gradients.
        """
        first = next(index for index, shape in enumerate(self.stack) if shape.weight)
        for index in range(len(self.stack) - 1, first - 1, -1):
            layer = self.stack[index].layer
            step = self.steps[index]
            if isinstance(layer, Exchange):
                exchanges -= 1
                if layer.summed:
                    _end(segments, Port(exchanges, BACK))
                else:
                    segments[-1].work.append(partial(self.exchange_buffers[exchanges].unpack, BACK, {}))
                continue
            if index > first:
                segments[-1].work.append(self._backward(step.backward_data))
            if step.backward_weights is not None:
                border = index > first and isinstance(self.stack[index - 1].layer, Exchange)
                work = segments[-1].meanwhile if border else segments[-1].work
                work.append(self._backward(step.backward_weights))

    def _forward(self, step: Callable) -> Work:
        return lambda: step(self.views)

    def _backward(self, step: Callable) -> Work:
        return lambda: step(self.views, self.gradients)

    def _end(self) -> None:
        """Compute the loss."""
        self.result = self._loss(self.labels)


def _end(segments: list[Segment], port: Port) -> None:
    """End the last segment at `port` and start another."""
    segments[-1].port = port
    segments.append(Segment())


def set_image_edges(exchanges: Sequence[ExchangeBuffers | AssemblyBuffers], edges: Sequence[int]) -> None:
    """Set where the images of each rank begin and end, in the buffers of an assembly."""
    for exchange in exchanges:
        if isinstance(exchange, AssemblyBuffers):
            exchange.edges = tuple(edges)


def _buffers(exchange: Exchange, strip: int, place: Place) -> ExchangeBuffers | AssemblyBuffers:
    """Return the buffers of `exchange`: views of a context's arrays (channels, rows, columns, images) as one block."""
    arrays = (place.inputs, place.outputs, place.input_errors, place.errors)
    if isinstance(exchange, Assembly):
        return AssemblyBuffers(exchange, strip, *(array.reshape(1, -1, array.shape[-1]) for array in arrays))
    return ExchangeBuffers(
        exchange, strip, *(array.reshape(1, exchange.lines, -1, array.shape[-1]) for array in arrays)
    )
