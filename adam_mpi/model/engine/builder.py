"""Collect the steps of a program: what is known while its layers are walked through, and what all steps need."""

import math
from collections.abc import Sequence

from adam_mpi.model import parameters
from adam_mpi.model.engine import activations_and_loss, schedule, source, tiles
from adam_mpi.model.engine.conv_choice import Choice
from adam_mpi.model.engine.schedule import Buffer, BufferPlan, Call, Crossing, Step
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Exchange, ranks_of
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.layers import Activation, Dense, Dropout, LayerShape

PASS_IMAGES = 64
"""Images that go through the network together; a larger batch takes several passes."""
IN_PLACE = (Activation, Dropout)
"""Layers whose errors are computed in place: they need no buffer of their own."""


class Builder:
    """Collects steps; `values` and `errors` are the buffers of the last output and of its errors.

    `copied`: parameters of a dense layer up to which each thread has a copy of them.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        images: int,
        lanes: int,
        registers: int,
        copied: int,
        choices: dict[str, Choice] | None = None,
        captured: Sequence[str] = (),
        batches: int = 1,
        form: InputFormat = SCALED_BYTES,
    ) -> None:
        self.shapes = shapes
        self.form = form
        self.registers = registers
        self.choices = dict(choices or {})
        own = -(-images // ranks_of(shape.layer for shape in shapes))
        # Few images would leave most lanes empty: each is a block of its own then, and vectors lie along its rows.
        self.row_lanes = lanes
        self.lanes = 1 if 2 * own < lanes else lanes
        self.round_images = batches * tiles.up(images, self.lanes)
        """Images of a round, for which buffers that are kept have room."""
        # A batch waits for other strips as one: then there are no passes.
        cut = any(isinstance(shape.layer, Exchange) for shape in shapes)
        blocks = -(-images // self.lanes)
        self.blocks = blocks if cut else min(blocks, max(1, PASS_IMAGES // self.lanes))
        self.own_blocks = -(-own // self.lanes) if own < images else self.blocks
        self.offsets = {tensor.name: tensor.offset for tensor in parameters.tensors(shapes)}
        large = tuple(s.name for s in shapes if isinstance(s.layer, Dense) and s.parameters > copied)
        self.uncopied: tuple[str, ...] = () if cut else large
        self.fused: tuple[str, ...] = () if self.per_image else self.uncopied
        self.fused_calls: list[Call] = []
        self.kept: dict[str, tuple[Buffer, ...]] = {layer: () for layer in captured}
        self.steps: list[Step] = []
        self.groups = [self.steps]
        """Steps between exchanges; `steps` are those of the last group."""
        self.crossings: list[Crossing] = []
        self.first_dense = next(index for index, shape in enumerate(shapes) if isinstance(shape.layer, Dense))
        self.inputs = Buffer("input", math.prod(shapes[0].input) * self.lanes)
        self.values = self.inputs
        self.errors = self.inputs
        self.relu = False
        """Whether the last output is relu's and its errors have still to be masked."""
        self.learning = False
        """Whether a layer with weights came already, so that errors have to go back that far."""
        self.source = self._source()

    @property
    def per_image(self) -> bool:
        """Return whether each image is a block of its own in the program."""
        return self.lanes < self.row_lanes

    @property
    def errors_first(self) -> bool:
        """Return whether the next step is the first behind an exchange that takes errors back to other strips."""
        return not self.steps and len(self.groups) > 1 and self.learning

    def _source(self) -> Source:
        """Return a source with the kernels that are not those of one layer: pixels, activation functions, loss."""
        source = Source()
        if self.per_image:
            source.head.append(f"globals().update(row_kit({self.row_lanes}))")
        for function in sorted({s.layer.function for s in self.shapes if isinstance(s.layer, Activation)}):
            activations_and_loss.emit_activation(source, function, self.lanes)
        activations_and_loss.emit_load(source, self.shapes[0].input, self.lanes, self.form)
        activations_and_loss.emit_loss(source, math.prod(self.shapes[-1].output), self.lanes)
        return source

    def count(self, buffer: Buffer, by_block: bool) -> str:
        """Return the expression of the floats in `buffer`: of one block, or of all blocks of a pass."""
        return f"{buffer.floats}" + ("" if by_block else " * blocks")

    def mask_calls(self, by_block: bool) -> list[Call]:
        """Return the calls that mask the errors which go back to a relu, for a step that does not mask them itself."""
        count = self.count(self.values, by_block)
        calls = [Call("relu_backward", ("memory", self.values, self.errors, count))] if self.relu else []
        self.relu = False
        return calls

    def add_output(self, index: int, exchanged: bool = False) -> None:
        """Make `values` and `errors` new buffers, for the output of layer `index`.

        Spatial errors live for one block only, where they are not `exchanged` before or behind the layer.
        """
        shape = self.shapes[index]
        after = (s.layer for s in self.shapes[index + 1 :] if not isinstance(s.layer, IN_PLACE))
        each_block = exchanged or index >= self._last_window() or isinstance(next(after, None), Exchange)
        self.values = Buffer(shape.name, math.prod(shape.output) * self.lanes)
        self.errors = Buffer(f"{shape.name}/errors", self.values.floats, each_block=each_block)

    def _last_window(self) -> int:
        """Return the index of the last layer before the dense ones that has errors of its own; -1: there is none."""
        spatial = range(self.first_dense)
        return max((index for index in spatial if not isinstance(self.shapes[index].layer, IN_PLACE)), default=-1)

    def finish(self) -> tuple[source.Entry, BufferPlan]:
        """Emit the functions that Python calls; return what they compute, and where the buffers lie."""
        # Only the weights of dense layers are overwritten as they come; the rest is added up from zero.
        summed = [
            (tensor.offset, tensor.offset + tensor.size)
            for tensor in parameters.tensors(self.shapes)
            if len(tensor.shape) != 2
        ]
        made = source.Entry(
            parts=self.parts(),
            fused_calls=tuple(self.fused_calls),
            blocks=self.blocks,
            own_blocks=self.own_blocks,
            lanes=self.lanes,
            summed=tuple(summed),
        )
        return made, source.emit_entry(self.source, made)

    def parts(self) -> tuple[schedule.Part, ...]:
        """Return all calls in order, cut into parts at the exchanges."""
        load = Call("load_pixels", ("pixels", "levels", "memory", self.inputs, "first", "count"))
        buffers = (self.values, self.errors, Buffer("side", 3 * self.lanes))
        end = Call("cross_entropy", ("memory", "labels", "probabilities", *buffers, "first", "count", "blocks"))
        return schedule.assemble(self.groups, self.crossings, load, end)
