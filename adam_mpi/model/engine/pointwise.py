"""Activation functions over any number of vectors, and the way back in terms of what they gave out.

forward:   for each vector: outputs = function(inputs)
backward:  for each vector: errors *= derivative(outputs), in place
"""

from adam_mpi.model.engine.source import Source

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


def emit(source: Source, function: str, lanes: int) -> None:
    """`count` is a number of floats."""
    with source.kernel(f"{function}_forward(memory, inputs, outputs, count)", FORWARD[function]):
        with source.inside(f"for place in range(0, count, {lanes}):"):
            source("x = load(memory, inputs + place)")
            source(f"store(memory, outputs + place, {FORWARD[function]})")
    with source.kernel(f"{function}_backward(memory, outputs, errors, count)", BACKWARD[function]):
        with source.inside(f"for place in range(0, count, {lanes}):"):
            source("y = load(memory, outputs + place)")
            source("e = load(memory, errors + place)")
            source(f"store(memory, errors + place, {BACKWARD[function]})")
