"""Emit kernels of single numbers: loading pixels, activation functions, dropout; and softmax with cross-entropy.

pixels:               one vector per pixel of one block, zero in lanes without an image; bytes become levels
activation forward:   for each vector: outputs = function(inputs)
activation backward:  for each vector: errors *= derivative(outputs), in place
dropout:              the same masks as the reference kernel's: a function of seed, epoch, image, layer and unit alone

for each block:
    the largest score of each image, and which it is
    errors = exp(score - largest), and their sum; divided by it they are probabilities
    for each image there is: add its loss, count it if the largest is right, subtract 1 from the error of its label
    for each lane without an image: errors = 0
"""

import math
from dataclasses import dataclass

from adam_mpi.base.errors import UserError
from adam_mpi.model.engine.source import Source
from adam_mpi.model.input_format import BYTES, InputFormat

FORWARD = {
    "relu": "maximum(zero(), x)",
    "tanh": "sub(splat(1.0), div(splat(2.0), add(exponential(add(x, x)), splat(1.0))))",
    "sigmoid": "div(splat(1.0), add(splat(1.0), exponential(sub(zero(), x))))",
}
BACKWARD = {
    "relu": "greater(y, zero(), e, zero())",
    "tanh": "mul(e, sub(splat(1.0), mul(y, y)))",
    "sigmoid": "mul(e, mul(y, sub(splat(1.0), y)))",
}


def emit_load(source: Source, shape: tuple[int, int, int], lanes: int, form: InputFormat) -> None:
    """Emit `load_pixels`, which turns images of `shape` in a block into the first layer's inputs."""
    size = math.prod(shape)
    with source.kernel("load_pixels(pixels, levels, memory, inputs, first, count)", f"{size} pixels per image."):
        with source.inside(f"for lane in range({lanes}):"):
            with source.inside("if first + lane < count:"):
                source(f"start = (first + lane) * {size}")
                with source.inside(f"for pixel in range({size}):"):
                    value = _level("pixels[start + pixel]", size // shape[0], form)
                    source(f"memory[inputs + pixel * {lanes} + lane] = {value}")
            with source.inside("else:"):
                with source.inside(f"for pixel in range({size}):"):
                    source(f"memory[inputs + pixel * {lanes} + lane] = 0")


def _level(pixel: str, plane: int, form: InputFormat) -> str:
    """Return the expression of the number that `pixel` stands for; a channel has `plane` pixels."""
    if not form.bytes:
        return pixel
    return f"levels[pixel // {plane} * {BYTES} + np.int64({pixel})]" if form.mean else f"levels[{pixel}]"


def emit_activation(source: Source, function: str, lanes: int) -> None:
    """Emit the kernels of an activation function; `count` among their arguments is a number of floats.

    Raises UserError for a function that has no formula in FORWARD or BACKWARD.
    """
    for table, rule in ((FORWARD, "FORWARD"), (BACKWARD, "BACKWARD")):
        if function not in table:
            raise UserError(
                f"activation {function!r}: the generated engine has no formula for it in elementwise.{rule}; "
                'set kernels.engine = "reference"'
            )
    with source.kernel(f"{function}_forward(memory, inputs, outputs, count)", FORWARD[function]):
        with source.inside(f"for place in range(0, count, {lanes}):"):
            source("x = load(memory, inputs + place)")
            source(f"store(memory, outputs + place, {FORWARD[function]})")
    with source.kernel(f"{function}_backward(memory, outputs, errors, count)", BACKWARD[function]):
        with source.inside(f"for place in range(0, count, {lanes}):"):
            source("y = load(memory, outputs + place)")
            source("e = load(memory, errors + place)")
            source(f"store(memory, errors + place, {BACKWARD[function]})")


@dataclass(frozen=True)
class DropoutMask:
    """The mask of a dropout layer of `units` units; `layer` is its number among all layers of the model.

    `within`: (start, width, whole): of `whole` columns these are `width` ones from `start` on; a unit's number is that
    in the whole layer.
    """

    units: int
    within: tuple[int, int, int]
    layer: int
    rate: float


def emit_dropout(source: Source, name: str, mask: DropoutMask, lanes: int) -> None:
    """Emit the kernel `name` for one block; `first` is the number of its first image.

    The same call serves values and errors.
    """
    start, width, whole = mask.within
    limit = int(mask.rate * 2**32)
    scale = 1 / (1 - mask.rate)
    head = f"{name}(memory, keys, inputs, outputs, first, training)"
    with source.kernel(head, f"Zero a share {mask.rate} of {mask.units} units, scale up the others."):
        source(f"limit = np.uint64({limit} if training else 0)")
        source(f"scale = np.float32({scale!r} if training else 1.0)")
        number = "unit" if width == whole else f"unit // {width} * {whole} + {start} + unit % {width}"
        with source.inside(f"for unit in range({mask.units}):"):
            source(f"counter = (np.uint64({mask.layer}) << np.uint64(40) ^ np.uint64({number})) * SPREAD")
            with source.inside(f"for lane in range({lanes}):"):
                source("draw = mix(keys[first + lane] + counter) >> np.uint64(32)")
                source(f"value = memory[inputs + unit * {lanes} + lane]")
                source("kept = np.float32(0) if draw < limit else value * scale")
                source(f"memory[outputs + unit * {lanes} + lane] = kept")


def emit_loss(source: Source, classes: int, lanes: int) -> None:
    """Emit `cross_entropy` over `classes` classes.

    Its argument `first` is the number of the first image of these blocks, `count` that of all images, `side` has room
    for three vectors.
    """
    head = "cross_entropy(memory, labels, probabilities, scores, errors, side, first, count, blocks)"
    with source.kernel(head, f"Loss and number correct over {classes} classes; probabilities by image."):
        source("loss, correct = 0.0, 0")
        with source.inside("for block in range(blocks):"):
            source(f"z, e = scores + block * {classes * lanes}, errors + block * {classes * lanes}")
            _softmax(source, classes, lanes)
            with source.inside(f"for lane in range({lanes}):"):
                source(f"image = first + block * {lanes} + lane")
                _image(source, classes, lanes)
        source("return loss, correct")


def _softmax(source: Source, classes: int, lanes: int) -> None:
    source("best, winner, sums = load(memory, z), zero(), zero()")
    with source.inside(f"for k in range(1, {classes}):"):
        source(f"value = load(memory, z + k * {lanes})")
        source("winner = greater(value, best, splat(k), winner)")
        source("best = maximum(value, best)")
    with source.inside(f"for place in range(0, {classes * lanes}, {lanes}):"):
        source("value = exponential(sub(load(memory, z + place), best))")
        source("store(memory, e + place, value)")
        source("sums = add(sums, value)")
    with source.inside(f"for place in range(e, e + {classes * lanes}, {lanes}):"):
        source("store(memory, place, div(load(memory, place), sums))")
    source("store(memory, side, best)")
    source(f"store(memory, side + {lanes}, sums)")
    source(f"store(memory, side + {2 * lanes}, winner)")


def _image(source: Source, classes: int, lanes: int) -> None:
    with source.inside("if image < count:"):
        source("label = labels[image]")
        with source.inside(f"for k in range({classes}):"):
            source(f"probabilities[image * {classes} + k] = memory[e + k * {lanes} + lane]")
        source(f"score = memory[z + label * {lanes} + lane]")
        source(f"loss += np.log(memory[side + {lanes} + lane]) + memory[side + lane] - score")
        source(f"correct += memory[side + {2 * lanes} + lane] == label")
        source(f"memory[e + label * {lanes} + lane] -= np.float32(1)")
    with source.inside("else:"):
        with source.inside(f"for k in range({classes}):"):
            source(f"memory[e + k * {lanes} + lane] = 0")
