"""Reference kernels of convolutions, as matrix products over gathered columns (im2col), and of dense layers.

Rows are padded by `pad` above and below; columns by `left` at the left, and at the right as far as outputs reach.
Column buffer: one line for each (channel, kernel row, kernel column), one entry for each output position and image.
`columns` and `products` are flat scratch, large enough for `rows` output rows.
"""

import numpy as np
from numba import njit


@njit(nogil=True, cache=True)
def gather(inputs: np.ndarray, first: int, kernel: int, stride: int, pad: int, left: int, patches: np.ndarray) -> None:
    """Copy to `patches` what the output rows from `first` on see of the inputs; outside the image they see zero."""
    _, height, width, images = inputs.shape
    for line in range(patches.shape[0]):
        channel = line // (kernel * kernel)
        ky = line // kernel % kernel
        kx = line % kernel
        for row in range(patches.shape[1]):
            y = (first + row) * stride + ky - pad
            for column in range(patches.shape[2]):
                x = column * stride + kx - left
                if 0 <= y < height and 0 <= x < width:
                    for image in range(images):
                        patches[line, row, column, image] = inputs[channel, y, x, image]
                else:
                    for image in range(images):
                        patches[line, row, column, image] = 0


@njit(nogil=True, cache=True)
def scatter(patches: np.ndarray, first: int, kernel: int, stride: int, pad: int, left: int, inputs: np.ndarray) -> None:
    """Add `patches` to the inputs that `gather` copied them from: its transpose."""
    _, height, width, images = inputs.shape
    for line in range(patches.shape[0]):
        channel = line // (kernel * kernel)
        ky = line // kernel % kernel
        kx = line % kernel
        for row in range(patches.shape[1]):
            y = (first + row) * stride + ky - pad
            for column in range(patches.shape[2]):
                x = column * stride + kx - left
                if 0 <= y < height and 0 <= x < width:
                    for image in range(images):
                        inputs[channel, y, x, image] += patches[line, row, column, image]


@njit(nogil=True, cache=True)
def conv_forward(
    weight: np.ndarray,
    bias: np.ndarray,
    inputs: np.ndarray,
    stride: int,
    pad: int,
    left: int,
    rows: int,
    columns: np.ndarray,
    products: np.ndarray,
    outputs: np.ndarray,
) -> None:
    """Compute outputs = weight * inputs + bias."""
    filters, height, width, images = outputs.shape
    kernel = weight.shape[2]
    depth = weight.size // filters
    matrix = weight.reshape(filters, depth)
    planes = outputs.reshape(filters, height * width * images)
    for first in range(0, height, rows):
        group = min(rows, height - first)
        start = first * width * images
        span = group * width * images
        patches = columns[: depth * span].reshape(depth, group, width, images)
        gather(inputs, first, kernel=kernel, stride=stride, pad=pad, left=left, patches=patches)
        product = products[: filters * span].reshape(filters, span)
        np.dot(matrix, patches.reshape(depth, span), product)
        for index in range(filters):
            for position in range(span):
                planes[index, start + position] = product[index, position] + bias[index]


@njit(nogil=True, cache=True)
def take_rows(errors: np.ndarray, start: int, product: np.ndarray) -> None:
    """Copy the errors of a group of output rows into one piece."""
    for index in range(product.shape[0]):
        for position in range(product.shape[1]):
            product[index, position] = errors[index, start + position]


# The sum of errors may be taken in any order, so that it vectorizes.
@njit(nogil=True, cache=True, fastmath={"reassoc", "nsz"})
def conv_backward_weights(
    errors: np.ndarray,
    inputs: np.ndarray,
    stride: int,
    pad: int,
    left: int,
    rows: int,
    columns: np.ndarray,
    products: np.ndarray,
    sums: np.ndarray,
    weight_gradient: np.ndarray,
    bias_gradient: np.ndarray,
) -> None:
    """Add the gradient of weight and bias, summed over the images; `sums` is flat scratch of the weight's size."""
    filters, height, width, images = errors.shape
    kernel = weight_gradient.shape[2]
    depth = weight_gradient.size // filters
    planes = errors.reshape(filters, height * width * images)
    gradient = weight_gradient.reshape(filters, depth)
    partial = sums[: filters * depth].reshape(filters, depth)
    for first in range(0, height, rows):
        group = min(rows, height - first)
        start = first * width * images
        span = group * width * images
        patches = columns[: depth * span].reshape(depth, group, width, images)
        gather(inputs, first, kernel=kernel, stride=stride, pad=pad, left=left, patches=patches)
        product = products[: filters * span].reshape(filters, span)
        take_rows(planes, start, product)
        np.dot(product, patches.reshape(depth, span).T, partial)
        for index in range(filters):
            for line in range(depth):
                gradient[index, line] += partial[index, line]
    for index in range(filters):
        total = bias_gradient[index]
        for position in range(height * width * images):
            total += planes[index, position]
        bias_gradient[index] = total


@njit(nogil=True, cache=True)
def conv_backward_data(
    weight: np.ndarray,
    errors: np.ndarray,
    stride: int,
    pad: int,
    left: int,
    rows: int,
    columns: np.ndarray,
    products: np.ndarray,
    input_errors: np.ndarray,
) -> None:
    """Compute the errors of the inputs."""
    filters, height, width, images = errors.shape
    kernel = weight.shape[2]
    depth = weight.size // filters
    matrix = weight.reshape(filters, depth)
    planes = errors.reshape(filters, height * width * images)
    input_errors[:] = 0
    for first in range(0, height, rows):
        group = min(rows, height - first)
        start = first * width * images
        span = group * width * images
        product = products[: filters * span].reshape(filters, span)
        take_rows(planes, start, product)
        patches = columns[: depth * span].reshape(depth, group, width, images)
        np.dot(matrix.T, product, patches.reshape(depth, span))
        scatter(patches, first, kernel=kernel, stride=stride, pad=pad, left=left, inputs=input_errors)


@njit(nogil=True, cache=True)
def dense_forward(weight: np.ndarray, bias: np.ndarray, inputs: np.ndarray, outputs: np.ndarray) -> None:
    """Compute outputs = weight @ inputs + bias."""
    np.dot(weight, inputs, outputs)
    for unit in range(outputs.shape[0]):
        for image in range(outputs.shape[1]):
            outputs[unit, image] += bias[unit]


@njit(nogil=True, cache=True)
def dense_backward_weights(
    errors: np.ndarray,
    inputs: np.ndarray,
    sums: np.ndarray,
    weight_gradient: np.ndarray,
    bias_gradient: np.ndarray,
) -> None:
    """Add the gradient of weight and bias, summed over the images; `sums` is flat scratch of at least one row."""
    units, features = weight_gradient.shape
    rows = sums.size // features
    for first in range(0, units, rows):
        last = min(first + rows, units)
        partial = sums[: (last - first) * features].reshape(last - first, features)
        np.dot(errors[first:last], inputs.T, partial)
        for unit in range(first, last):
            for feature in range(features):
                weight_gradient[unit, feature] += partial[unit - first, feature]
    for unit in range(units):
        for image in range(errors.shape[1]):
            bias_gradient[unit] += errors[unit, image]


@njit(nogil=True, cache=True)
def dense_backward_data(weight: np.ndarray, errors: np.ndarray, input_errors: np.ndarray) -> None:
    """Compute the errors of the inputs."""
    np.dot(weight.T, errors, input_errors)
