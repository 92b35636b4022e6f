"""From layers to a program: layers that run as one are joined, kernels emitted, calls listed, buffers laid out."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from adam_mpi.model import parameters
from adam_mpi.model.engine import (
    average,
    border,
    dense_fused_update,
    dense_product,
    dense_weights,
    dropout,
    entry,
    local_response_norm,
    loss,
    per_image_conv,
    per_image_dense,
    pixels,
    pointwise,
    pool,
    tiles,
    winograd1d_step,
    winograd2d_step,
)
from adam_mpi.model.engine import conv_step as convs
from adam_mpi.model.engine import segments as parts
from adam_mpi.model.engine.convolution import shape_of
from adam_mpi.model.engine.memory import Buffer, Call, Step
from adam_mpi.model.engine.segments import Crossing, Part
from adam_mpi.model.engine.source import Source
from adam_mpi.model.exchange import Exchange, ranks_of
from adam_mpi.model.layers import Activation, AvgPool, Conv, Dense, Dropout, LayerShape, LocalResponseNorm, MaxPool

PASS_IMAGES = 64
"""Images that go through the network together; a larger batch takes several passes."""
COPIED = 2**20
"""Parameters of a fully-connected layer up to which each thread has a copy."""


@dataclass(frozen=True)
class Program:
    """Emitted source of a function `run`, and the floats of memory it works in."""

    text: str
    floats: int
    apart: int
    """Floats that its buffers would take if none shared memory with another."""
    blocks: int
    """Blocks of images that go through the network together."""
    own_blocks: int
    """Of a rank's own images, before those of a hybrid replica are put together; else the same."""
    lanes: int
    """Images in a block."""
    batches: int
    """Of a round, whose activations and errors of large layers are kept."""
    choices: dict[str, convs.Choice]
    """How each convolution is computed."""
    uncopied: tuple[str, ...]
    """Layers whose weights are read in `shared`."""
    settled: tuple[str, ...]
    """Those of them whose gradient and step are one pass over the weights, at the end of a round of batches."""
    kept: dict[str, tuple[tuple[int, int], ...]]
    """Captured layer -> where its activations and its errors lie in memory, image by image: (place, floats apart)."""
    parts: tuple[Part, ...]
    """What `run` computes; between those of a strip there are exchanges, and it is called for each of them."""
    crossings: tuple[Crossing, ...]
    places: dict[Buffer, int]
    """Of all buffers, in memory."""


def build(
    shapes: Sequence[LayerShape],
    images: int,
    lanes: int,
    registers: int,
    choices: dict[str, convs.Choice] | None = None,
    captured: Sequence[str] = (),
    batches: int = 1,
) -> Program:
    """The program for batches of up to `images` images; what is not among the choices is decided by arithmetic.

    Activations and errors of the dense layers in `captured` are kept, and those of large layers for a round of
    `batches`. Where there are exchanges among the layers, as in the stack of a strip, the program is cut there.
    """
    return Builder(shapes, images, lanes, registers, choices, captured, batches).program()


def conv_step(job: convs.Job, choice: convs.Choice) -> Step:
    if choice["algorithm"] == "direct":
        return convs.direct(job, choice)
    return {"winograd": winograd2d_step, "lines": winograd1d_step}[choice["algorithm"]].step(job)


class Builder:
    """Walks through the layers; `values` and `errors` are the buffers of the last output and of its errors."""

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        images: int,
        lanes: int,
        registers: int,
        choices: dict[str, convs.Choice] | None = None,
        captured: Sequence[str] = (),
        batches: int = 1,
    ) -> None:
        self.choices = dict(choices or {})
        self.cut = any(isinstance(shape.layer, Exchange) for shape in shapes)
        own = -(-images // ranks_of(shape.layer for shape in shapes))
        # Few images would leave most lanes empty: each is a block of its own then, and vectors lie along its columns.
        self.wide, lanes = lanes, 1 if 2 * own < lanes else lanes
        self.kept: dict[str, tuple[Buffer, ...]] = {layer: () for layer in captured}
        self.batches, self.images = batches, batches * tiles.up(images, lanes)
        """For which buffers that are kept have room."""
        self.shapes, self.lanes, self.registers = shapes, lanes, registers
        # A batch waits for other strips as one: then there are no passes.
        blocks = -(-images // lanes)
        self.blocks = blocks if self.cut else min(blocks, max(1, PASS_IMAGES // lanes))
        self.own_blocks = -(-own // lanes) if own < images else self.blocks
        self.places = {tensor.name: tensor.offset for tensor in parameters.tensors(shapes)}
        large = [s.name for s in shapes if isinstance(s.layer, Dense) and s.parameters > COPIED]
        self.uncopied = () if self.cut else tuple(large)
        self.settled = self.uncopied if lanes == self.wide else ()
        self.settling: list[Call] = []
        self.source = Source()
        self.steps: list[Step] = []
        self.groups = [self.steps]
        """Steps between exchanges; `steps` are those of the last group."""
        self.crossings: list[Crossing] = []
        dense = next(index for index, shape in enumerate(shapes) if isinstance(shape.layer, Dense))
        windows = [index for index in range(dense) if not isinstance(shapes[index].layer, Activation | Dropout)]
        self.dense, self.last_window = dense, max(windows, default=-1)
        self.values = self.errors = Buffer("input", math.prod(shapes[0].input) * lanes)
        self.relu = False
        """Whether the last output is relu's and its errors have still to be masked."""
        self.learning = False
        """Whether a layer with weights came already, so that errors have to go back that far."""

    def program(self) -> Program:
        if self.lanes < self.wide:
            self.source.head.append(f"globals().update(wide({self.wide}))")
        for function in sorted({s.layer.function for s in self.shapes if isinstance(s.layer, Activation)}):
            pointwise.emit(self.source, function, self.lanes)
        pixels.emit(self.source, math.prod(self.shapes[0].input), self.lanes)
        loss.emit(self.source, math.prod(self.shapes[-1].output), self.lanes)
        inputs = self.values
        index = 0
        while index < len(self.shapes):
            index += self.layer(index)
        cut = self.parts(inputs)
        # Only the weights of fully-connected layers are overwritten as they come; the rest is added up from zero.
        added = [
            (tensor.offset, tensor.offset + tensor.size)
            for tensor in parameters.tensors(self.shapes)
            if len(tensor.shape) != 2
        ]
        blocks = self.blocks, self.own_blocks
        text, floats, apart, places = entry.emit(self.source, cut, self.settling, *blocks, self.lanes, added)
        kept = {layer: tuple((places[b], b.floats) for b in buffers) for layer, buffers in self.kept.items()}
        return Program(
            text,
            floats,
            apart,
            *blocks,
            self.lanes,
            self.batches,
            self.choices,
            self.uncopied,
            self.settled,
            kept,
            cut,
            tuple(self.crossings),
            places,
        )

    def layer(self, index: int) -> int:
        """Add the step that begins with this layer; return how many layers it took."""
        layer = self.shapes[index].layer
        if isinstance(layer, Conv):
            return self.conv(index)
        if isinstance(layer, Dense):
            return self.fully_connected(index)
        if isinstance(layer, AvgPool):
            self.average(index, layer)
        elif isinstance(layer, MaxPool):
            self.pool(index, layer)
        elif isinstance(layer, LocalResponseNorm):
            self.normalize(index, layer)
        elif isinstance(layer, Dropout):
            self.dropout(index, layer)
        elif isinstance(layer, Exchange):
            self.exchange(index, layer)
        elif isinstance(layer, Activation):
            self.activation(index, layer)
        return 1

    def exchange(self, index: int, layer: Exchange) -> None:
        """Ends a group of steps; what errors still lack when they come back is that group's first work."""
        owned, owned_errors, by_block = self.values, self.errors, index < self.dense
        if masks := self.mask_calls(by_block):
            self.steps.append(Step(by_block, [], masks))
        needed, needed_errors = self.output(index, handed=True)
        self.crossings.append(Crossing(layer, owned, needed, owned_errors, needed_errors, self.learning))
        self.steps = []
        self.groups.append(self.steps)

    @property
    def apart(self) -> bool:
        """Whether the next step is the first behind an exchange that takes errors back to other strips."""
        return not self.steps and len(self.groups) > 1 and self.learning

    def conv(self, index: int) -> int:
        relu, window, taken = joined(self.shapes, index)
        shape, apart = shape_of(self.shapes[index]), self.apart
        inputs, input_errors, masked = self.values, self.errors, self.relu
        outputs, errors = self.output(index + taken - 1, handed=apart)
        job = convs.Job(
            self.source,
            self.shapes[index].name,
            shape,
            self.lanes,
            self.registers,
            relu,
            window,
            masked,
            self.places[f"{self.shapes[index].name}/weight"],
            self.places[f"{self.shapes[index].name}/bias"],
            inputs,
            outputs,
            errors,
            input_errors if self.learning else None,
            apart,
        )
        if self.lanes < self.wide:
            self.steps.append(per_image_conv.step(job, self.wide))
        else:
            choice = self.choices.get(job.name) or convs.choices(shape, window, self.registers)[0]
            self.choices[job.name] = choice
            following, images = self.shapes[index + taken - 1 :], self.blocks * self.lanes
            spans = border.spans(following, shape, window, choice["algorithm"], images)
            self.steps.append(conv_step(replace(job, spans=spans), choice))
        self.learning, self.relu = True, relu and window == 1
        return taken

    def fully_connected(self, index: int) -> int:
        name, lanes, source = self.shapes[index].name, self.lanes, self.source
        relu = self.is_relu(index + 1)
        units, features = self.shapes[index].weight or ()
        weight, bias = str(self.places[f"{name}/weight"]), self.places[f"{name}/bias"]
        weights = "shared" if name in self.uncopied else "weights"
        inputs, input_errors, mask = self.values, self.errors, self.relu
        outputs, errors = self.output(index + relu)
        if name in self.settled:
            self.errors = errors = Buffer(errors.name, units, images=self.images)
        if self.lanes < self.wide:
            layer = per_image_dense.Layer(weights, units, features, int(weight), bias, self.wide)
            buffers = inputs, outputs, errors, input_errors if self.learning else None
            step = per_image_dense.step(source, name, layer, relu, mask, self.registers, *buffers, self.apart)
            self.keep(step, name, (inputs, features), (errors, units))
            self.steps.append(step)
            self.learning, self.relu = True, relu
            return 1 + relu
        panel = self.product(f"{name}_forward", dense_product.forward(units, features, bias, relu))
        turned = self.turned(name, "activations", features)
        dense_weights.emit_turn(source, f"{name}_turn", features, lanes)
        tile = tiles.choose(units, -(-features // lanes), self.registers, overhead=1.0)
        group = dense_weights.group(self.blocks * lanes)
        dense_weights.emit(source, f"{name}_weights", units, features, lanes, tile, group, bias)
        arguments = ("memory", weights, weight, inputs, outputs, outputs, panel, "blocks")
        step = Step(False, [Call(f"{name}_forward", arguments)])
        if self.learning:
            panel = self.product(f"{name}_data", dense_product.to_data(units, features, mask))
            arguments = ("memory", weights, weight, errors, input_errors, inputs, panel, "blocks")
            step.backward.append(Call(f"{name}_data", arguments))
        sums = ("memory", "gradient", weight, errors, turned, "blocks", "fresh")
        to_weights = step.later if self.apart else step.backward
        to_weights.append(Call(f"{name}_turn", ("memory", inputs, turned, "blocks")))
        to_weights.append(Call(f"{name}_weights", sums, "not later" if name in self.settled else ""))
        if name in self.settled:
            self.settle(name, units, features, weight, bias, errors, turned)
        if name in self.kept:
            self.kept[name] = (turned,)
            self.keep(step, name, (errors, units))
        self.steps.append(step)
        self.learning, self.relu = True, relu
        return 1 + relu

    def settle(
        self, name: str, units: int, features: int, weight: str, bias: int, errors: Buffer, turned: Buffer
    ) -> None:
        tile = tiles.choose(units, -(-features // self.lanes), self.registers, overhead=1.0)
        dense_fused_update.emit(self.source, f"{name}_settle", units, features, bias, self.lanes, tile)
        panel = Buffer(f"{name}/panel of a round", self.images * tile.columns * self.lanes, each_block=False)
        places = ("memory", "shared", "contribution", weight, errors, turned, panel)
        self.settling.append(Call(f"{name}_settle", (*places, "blocks", "factor", "unit_value")))

    def keep(self, step: Step, name: str, *kept: tuple[Buffer, int]) -> None:
        """A captured layer's buffers, so many numbers per image each, are turned as they are on the way back."""
        if name in self.kept:
            for number, (buffer, columns) in enumerate(kept):
                turned = self.turned(name, f"kept{number}", columns)
                dense_weights.emit_turn(self.source, f"{name}_keep{number}", columns, self.lanes)
                step.backward.append(Call(f"{name}_keep{number}", ("memory", buffer, turned, "blocks")))
                self.kept[name] += (turned,)

    def turned(self, name: str, what: str, columns: int) -> Buffer:
        """Where values lie image by image: of a pass, or of all batches of a round if they are kept."""
        if name in self.kept or name in self.settled:
            return Buffer(f"{name}/{what}", dense_weights.turned_row(columns, self.lanes), images=self.images)
        return Buffer(f"{name}/{what}", dense_weights.turned_floats(columns, self.lanes))

    def product(self, name: str, product: dense_product.Product) -> Buffer:
        """Emit it; the panel it works with."""
        tile, single = dense_product.choose(product, self.blocks, self.registers)
        dense_product.emit(self.source, name, product, self.lanes, tile, single)
        packed = dense_product.group(product, self.lanes, tile)
        return Buffer(f"{name}/panel", dense_product.CHUNK * packed, each_block=False)

    def pool(self, index: int, layer: MaxPool) -> None:
        shape, inputs, input_errors = self.shapes[index], self.values, self.errors
        masks = self.mask_calls(True)
        outputs, errors = self.output(index)
        winners = Buffer(f"{shape.name}/winners", outputs.floats)
        window = layer.size, layer.stride, self.lanes
        pool.emit_forward(self.source, f"{shape.name}_forward", shape.input, *window)
        step = Step(True, [Call(f"{shape.name}_forward", ("memory", inputs, outputs, winners))])
        if self.learning:
            pool.emit_backward(self.source, f"{shape.name}_backward", shape.input, *window)
            step.backward = [Call(f"{shape.name}_backward", ("memory", errors, winners, input_errors)), *masks]
        self.steps.append(step)

    def average(self, index: int, layer: AvgPool) -> None:
        shape, inputs, input_errors, masks = self.shapes[index], self.values, self.errors, self.mask_calls(True)
        outputs, errors = self.output(index)
        window = layer.size, layer.stride, self.lanes
        average.emit_forward(self.source, f"{shape.name}_forward", shape.input, *window)
        step = Step(True, [Call(f"{shape.name}_forward", ("memory", inputs, outputs))])
        if self.learning:
            average.emit_backward(self.source, f"{shape.name}_backward", shape.input, *window)
            step.backward = [Call(f"{shape.name}_backward", ("memory", errors, input_errors)), *masks]
        self.steps.append(step)

    def normalize(self, index: int, layer: LocalResponseNorm) -> None:
        shape, inputs, input_errors, masks = self.shapes[index], self.values, self.errors, self.mask_calls(True)
        outputs, errors = self.output(index)
        scales = Buffer(f"{shape.name}/scales", outputs.floats)
        local_response_norm.emit_forward(self.source, f"{shape.name}_forward", shape.input, layer, self.lanes)
        step = Step(True, [Call(f"{shape.name}_forward", ("memory", inputs, outputs, scales))])
        if self.learning:
            local_response_norm.emit_backward(self.source, f"{shape.name}_backward", shape.input, layer, self.lanes)
            arguments = ("memory", errors, inputs, outputs, scales, input_errors)
            step.backward = [Call(f"{shape.name}_backward", arguments), *masks]
        self.steps.append(step)

    def dropout(self, index: int, layer: Dropout) -> None:
        shape, inputs = self.shapes[index], self.values
        masks = self.mask_calls(True)
        self.values = Buffer(shape.name, inputs.floats)
        # Masks know layers by their number among all of the model's, whatever a strip has between them.
        number = sum(not isinstance(before.layer, Exchange) for before in self.shapes[:index])
        units = math.prod(shape.input)
        dropout.emit(self.source, shape.name, units, shape.within, number, layer.rate, self.lanes)
        arguments = ("memory", "keys", inputs, self.values, "first", "training")
        step = Step(True, [Call(shape.name, arguments)])
        if self.learning:
            arguments = ("memory", "keys", self.errors, self.errors, "first", "training")
            step.backward = [Call(shape.name, arguments), *masks]
        self.steps.append(step)

    def activation(self, index: int, layer: Activation) -> None:
        name, inputs, by_block = layer.function, self.values, index < self.dense
        masks = self.mask_calls(by_block)
        self.values = Buffer(self.shapes[index].name, inputs.floats)
        count = f"{inputs.floats}" + ("" if by_block else " * blocks")
        step = Step(by_block, [Call(f"{name}_forward", ("memory", inputs, self.values, count))])
        if self.learning:
            step.backward = [Call(f"{name}_backward", ("memory", self.values, self.errors, count)), *masks]
        self.steps.append(step)

    def mask_calls(self, by_block: bool) -> list[Call]:
        """What a step that hands errors back to a relu calls after it, if it does not mask them itself."""
        count = f"{self.values.floats}" + ("" if by_block else " * blocks")
        calls = [Call("relu_backward", ("memory", self.values, self.errors, count))] if self.relu else []
        self.relu = False
        return calls

    def output(self, index: int, handed: bool = False) -> tuple[Buffer, Buffer]:
        """The buffers of a step's output and its errors; spatial errors live for one block's turn only, where they are
        not handed over to or by an exchange."""
        shape = self.shapes[index]
        after = (s.layer for s in self.shapes[index + 1 :] if not isinstance(s.layer, Activation | Dropout))
        each_block = handed or index >= self.last_window or isinstance(next(after, None), Exchange)
        self.values = Buffer(shape.name, math.prod(shape.output) * self.lanes)
        self.errors = Buffer(f"{shape.name}/errors", self.values.floats, each_block=each_block)
        return self.values, self.errors

    def is_relu(self, index: int) -> bool:
        return index < len(self.shapes) and self.shapes[index].layer == Activation("relu")

    def parts(self, inputs: Buffer) -> tuple[Part, ...]:
        load = Call("load_pixels", ("pixels", "levels", "memory", inputs, "first", "count"))
        places = self.values, self.errors, Buffer("side", 3 * self.lanes)
        end = Call("cross_entropy", ("memory", "labels", "probabilities", *places, "first", "count", "blocks"))
        return parts.assemble(self.groups, self.crossings, load, end)


def joined(shapes: Sequence[LayerShape], index: int) -> tuple[bool, int, int]:
    """Whether relu follows the convolution, the window of a max-pooling that does, and how many layers that makes.

    Relu before and after max-pooling is the same.
    """
    relu, window, taken = False, 1, 1
    for shape in shapes[index + 1 : index + 3]:
        layer = shape.layer
        if not relu and layer == Activation("relu"):
            relu = True
        elif window == 1 and type(layer) is MaxPool and layer.size == layer.stride > 1:
            window = layer.size
        else:
            break
        taken += 1
    return relu, window, taken
