"""Emit softmax and cross-entropy, for all blocks at once.

for each block:
    the largest score of each image, and which it is
    errors = exp(score - largest), and their sum; divided by it they are probabilities
    for each image there is: add its loss, count it if the largest is right, subtract 1 from the error of its label
    for each lane without an image: errors = 0
"""

from adam_mpi.model.engine.source import Source


def emit(source: Source, classes: int, lanes: int) -> None:
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
