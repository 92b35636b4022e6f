"""Slow, clear NumPy versions of every layer in float64, image-innermost: (channels, rows, columns, images)."""

import numpy as np


def windows(inputs, size, stride, pad):
    """Yield (row, column, y, x) of every window over the padded input."""
    rows = (inputs.shape[1] + 2 * pad - size) // stride + 1
    columns = (inputs.shape[2] + 2 * pad - size) // stride + 1
    for row in range(rows):
        for column in range(columns):
            yield row, column, row * stride, column * stride


def padded(inputs, pad):
    return np.pad(np.asarray(inputs, np.float64), ((0, 0), (pad, pad), (pad, pad), (0, 0)))


def conv_forward(weight, bias, inputs, stride, pad):
    kernel, image = weight.shape[2], padded(inputs, pad)
    rows, columns = ((side - kernel) // stride + 1 for side in image.shape[1:3])
    outputs = np.zeros((weight.shape[0], rows, columns, inputs.shape[3]))
    for row, column, y, x in windows(inputs, kernel, stride, pad):
        patch = image[:, y : y + kernel, x : x + kernel]
        outputs[:, row, column] = np.einsum("mcyx,cyxn->mn", weight, patch) + bias[:, None]
    return outputs


def conv_backward(weight, inputs, errors, stride, pad):
    """Gradients of weight, bias and inputs."""
    kernel, image = weight.shape[2], padded(inputs, pad)
    weight_gradient, image_errors = np.zeros(weight.shape), np.zeros(image.shape)
    for row, column, y, x in windows(inputs, kernel, stride, pad):
        place = slice(None), slice(y, y + kernel), slice(x, x + kernel)
        weight_gradient += np.einsum("mn,cyxn->mcyx", errors[:, row, column], image[place])
        image_errors[place] += np.einsum("mn,mcyx->cyxn", errors[:, row, column], weight)
    height, width = inputs.shape[1:3]
    return weight_gradient, errors.sum(axis=(1, 2, 3)), image_errors[:, pad : pad + height, pad : pad + width]


def pool_forward(inputs, size, stride):
    """Outputs, and the winner of each window as its position in the input plane; of equals the first."""
    rows, columns = ((side - size) // stride + 1 for side in inputs.shape[1:3])
    outputs = np.zeros((inputs.shape[0], rows, columns, inputs.shape[3]))
    winners = np.zeros(outputs.shape, np.int32)
    for row, column, y, x in windows(inputs, size, stride, 0):
        patch = inputs[:, y : y + size, x : x + size].reshape(inputs.shape[0], size * size, -1)
        best = patch.argmax(axis=1)
        outputs[:, row, column] = patch.max(axis=1)
        winners[:, row, column] = (y + best // size) * inputs.shape[2] + x + best % size
    return outputs, winners


def pool_backward(errors, winners, shape):
    channels, height, width, images = shape
    flat = np.zeros((channels, height * width, images))
    for channel, row, column, image in np.ndindex(*errors.shape):
        flat[channel, winners[channel, row, column, image], image] += errors[channel, row, column, image]
    return flat.reshape(shape)


def softmax(logits):
    powers = np.exp(logits - logits.max(axis=0))
    return powers / powers.sum(axis=0)
