"""Ready models as Python functions, for what the list of layers in a configuration does not describe."""

from collections.abc import Sequence

from adam_mpi import nn
from adam_mpi.model.graph import Graph


def unet(
    shape: Sequence[int] = (3, 64, 64), classes: int = 2, widths: Sequence[int] = (32, 64, 128), dtype: str = "byte"
) -> Graph:
    """Return a U-Net that tells the class of each pixel: the target has one class per pixel.

    Parameters
    ----------
    shape : sequence of int
        Channels, rows and columns of a sample; both are divided by two between two `widths`.
    classes : int
        Classes of a pixel.
    widths : sequence of int
        Channels at each resolution, the finest one first.
    dtype : str
        Type of the input: byte or float.

    Returns
    -------
    Graph
        With the scores as output, and the share of pixels that are right as the sum "correct".

    Examples
    --------
    >>> from adam_mpi.networks import unet
    >>> graph = unet((1, 16, 16), classes=3, widths=(4, 8))
    >>> graph.values[graph.outputs[0]].shape
    (3, 16, 16)
    """
    value = nn.input(shape, dtype)
    skips = []
    for width in widths[:-1]:
        skips.append(_twice(value, width))
        value = nn.max_pool(skips[-1], 2)
    value = _twice(value, widths[-1])
    for width, skip in zip(reversed(widths[:-1]), reversed(skips), strict=True):
        value = _twice(nn.concat(skip, nn.conv_transpose(value, width, 2, stride=2)), width)
    scores = nn.conv(value, classes, 1)
    target = nn.target(shape[1:])
    loss = nn.softmax_cross_entropy(scores, target)
    return nn.graph(scores, loss, {"correct": nn.correct(scores, target)})


def _twice(value: nn.Tensor, width: int) -> nn.Tensor:
    """Return two convolutions of `value`, each with batch norm and relu."""
    for _ in range(2):
        value = nn.relu(nn.batch_norm(nn.conv(value, width, 3, pad=1, bias=False)))
    return value
