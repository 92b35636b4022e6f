"""One batch of each optimizer rule in float64, as textbooks have it."""

import numpy as np

from adam_mpi.optimizer.settings import Settings

SETTINGS = Settings(momentum=0.9, decay=0.01, beta1=0.8, beta2=0.95, epsilon=1e-6, l1=0.05)


def step_of(name, weights, states, gradient, rate, before, settings=SETTINGS):
    """Return (weights, states) after a batch with this `gradient`, the batch `before` + 1 of the training."""
    if name == "additive":
        return weights + gradient, states
    if name == "ftrl":
        return _ftrl(weights, states, gradient, rate, settings)
    if name == "adamw":
        weights = weights - rate * settings.decay * weights
    else:
        gradient = gradient + settings.decay * weights
    if name == "descent":
        return weights - rate * gradient, states
    if name in ("momentum", "nesterov"):
        velocity = settings.momentum * states[0] + gradient
        ahead = gradient + settings.momentum * velocity if name == "nesterov" else velocity
        return weights - rate * ahead, np.stack([velocity])
    if name == "adagrad":
        squares = states[0] + gradient**2
        return weights - rate * gradient / (np.sqrt(squares) + settings.epsilon), np.stack([squares])
    square = settings.beta2 * states[-1] + (1 - settings.beta2) * gradient**2
    if name == "rmsprop":
        return weights - rate * gradient / (np.sqrt(square) + settings.epsilon), np.stack([square])
    mean = settings.beta1 * states[0] + (1 - settings.beta1) * gradient
    corrected = mean / (1 - settings.beta1 ** (before + 1))
    root = np.sqrt(square / (1 - settings.beta2 ** (before + 1)))
    return weights - rate * corrected / (root + settings.epsilon), np.stack([mean, square])


def _ftrl(weights, states, gradient, rate, settings):
    """Return (weights, states) after a batch of FTRL-Proximal (McMahan et al., 2013) with beta = 1.

    The dual vector is kept times the rate. That of a weight that had no gradient is the one it follows from.
    """
    dual, squares = states[0] / rate, states[1]
    first = -(weights * (1 / rate + settings.decay)) - settings.l1 * np.sign(weights)
    dual = np.where(squares > 0, dual, first)
    grown = squares + gradient**2
    dual = dual + gradient - (np.sqrt(grown) - np.sqrt(squares)) / rate * weights
    scale = (1 + np.sqrt(grown)) / rate + settings.decay
    weights = -np.sign(dual) * np.maximum(0, np.abs(dual) - settings.l1) / scale
    return weights, np.stack([dual * rate, grown])
