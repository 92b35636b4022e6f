"""The step of each rule on a block of parameters, whose weights and state stay in a near cache meanwhile.

A block of weights begins somewhere in a shard; `past` is the address of the first state vector at that place, and
`stride` the bytes from one state vector to the next. The gradient is `scale` times `source`. `row` has the coefficients
of the rule, in the order of the named tuples in `linear.py` and `adaptive.py`.
"""

import numpy as np
from numba import njit

from adam_mpi.base.native import floats

ADDITIVE, DESCENT, VELOCITY, ADAGRAD, RMSPROP, ADAM, FTRL = range(7)
STATES = (0, 0, 1, 1, 1, 2, 2)
"""State vectors of each kernel."""


# Without numpy's rules a division checks for zero and raises, which keeps loops from being vectorized.
@njit(nogil=True, cache=True, error_model="numpy")
def take_step(rule, block, past, stride, source, scale, row):  # type: ignore[no-untyped-def]
    """Step a block by the kernel `rule`; those without a state fold gradients straight into the weights instead."""
    if rule == VELOCITY:
        _velocity(block, floats(past, block.size), source, scale, row)
    elif rule == ADAGRAD:
        _adagrad(block, floats(past, block.size), source, scale, row)
    elif rule == RMSPROP:
        _rmsprop(block, floats(past, block.size), source, scale, row)
    elif rule == ADAM:
        _adam(block, floats(past, block.size), floats(past + stride, block.size), source, scale, row)
    else:
        _ftrl(block, floats(past, block.size), floats(past + stride, block.size), source, scale, row)


@njit(nogil=True, cache=True)
def _velocity(block, velocities, source, scale, row):  # type: ignore[no-untyped-def]
    """Step a rule with a velocity: `linear.Coefficients`."""
    shrink = row[0]
    gain = row[1]
    carry = row[2]
    keep = row[3]
    take = row[4]
    pull = row[5]
    for i in range(block.size):
        weight = block[i]
        velocity = velocities[i]
        gradient = scale * source[i]
        velocities[i] = keep * velocity + (take * gradient + pull * weight)
        block[i] = weight - (carry * velocity + (gain * gradient + shrink * weight))


@njit(nogil=True, cache=True, error_model="numpy")
def _adagrad(block, squares, source, scale, row):  # type: ignore[no-untyped-def]
    """Step AdaGrad: `adaptive.Adagrad`."""
    gain = row[0]
    take = row[1]
    pull = row[2]
    epsilon = row[3]
    for i in range(block.size):
        gradient = scale * source[i] + pull * block[i]
        square = squares[i] + take * (gradient * gradient)
        squares[i] = square
        block[i] -= gain * gradient / (np.sqrt(square) + epsilon)


@njit(nogil=True, cache=True, error_model="numpy")
def _rmsprop(block, squares, source, scale, row):  # type: ignore[no-untyped-def]
    """Step RMSProp: `adaptive.Rmsprop`."""
    mean = scale * row[0]
    pull = row[1]
    keep = row[2]
    take = row[3]
    gain = row[4]
    epsilon = row[5]
    for i in range(block.size):
        gradient = mean * source[i] + pull * block[i]
        square = keep * squares[i] + take * (gradient * gradient)
        squares[i] = square
        block[i] -= gain * gradient / (np.sqrt(square) + epsilon)


@njit(nogil=True, cache=True, error_model="numpy")
def _adam(block, moments, squares, source, scale, row):  # type: ignore[no-untyped-def]
    """Step Adam or AdamW: `adaptive.Adam`."""
    mean = scale * row[0]
    pull = row[1]
    shrink = row[2]
    turn = row[3]
    keep = row[4]
    take = row[5]
    gain = row[6]
    epsilon = row[7]
    for i in range(block.size):
        weight = block[i]
        gradient = mean * source[i] + pull * weight
        moment = moments[i] + turn * (gradient - moments[i])
        square = keep * squares[i] + take * (gradient * gradient)
        moments[i] = moment
        squares[i] = square
        block[i] = (weight - shrink * weight) - gain * moment / (np.sqrt(square) + epsilon)


@njit(nogil=True, cache=True, error_model="numpy")
def _ftrl(block, duals, squares, source, scale, row):  # type: ignore[no-untyped-def]
    """Step FTRL-Proximal: `adaptive.Ftrl`.

    The dual of a parameter that has had no gradient yet is the one that its first weight follows from.
    """
    mean = scale * row[0]
    take = row[1]
    gain = row[2]
    l1 = row[3]
    base = row[4]
    for i in range(block.size):
        weight = block[i]
        before = squares[i]
        gradient = mean * source[i]
        square = before + take * (gradient * gradient)
        root = np.sqrt(square)
        sign = np.float32(weight > 0) - np.float32(weight < 0)
        dual = duals[i] if before > 0 else -(base * weight) - l1 * sign
        dual += gain * gradient - (root - np.sqrt(before)) * weight
        duals[i] = dual
        squares[i] = square
        left = max(abs(dual) - l1, np.float32(0))
        block[i] = (-left if dual > 0 else left) / (base + root)
