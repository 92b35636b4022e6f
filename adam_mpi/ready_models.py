"""Ready models that are built in Python: a regression, a language model of characters, wide-and-deep, and a U-Net.

from adam_mpi import ready_models

graph = ready_models.char_gpt(vocabulary=65)
"""

from collections.abc import Sequence

from adam_mpi import nn
from adam_mpi.model.graph import Graph


def mlp_regression(inputs: int = 20, outputs: int = 3, units: Sequence[int] = (64, 64)) -> Graph:
    """Return dense layers with relu that predict vectors of floats, with the mean squared error as loss.

    Parameters
    ----------
    inputs : int
        Numbers of a sample.
    outputs : int
        Numbers of its target.
    units : sequence of int
        Units of each hidden layer.

    Returns
    -------
    Graph
        Inputs "input" and "target"; the sum "absolute_error" is of the mean absolute error.
    """
    value = nn.input((inputs,))
    for width in units:
        value = nn.relu(nn.dense(value, width))
    value = nn.dense(value, outputs)
    target = nn.target((outputs,), "float")
    errors = {"absolute_error": nn.mean_absolute_error(value, target)}
    return nn.graph(value, nn.mean_squared_error(value, target), errors)


def char_gpt(
    vocabulary: int = 96, length: int = 64, width: int = 128, heads: int = 4, layers: int = 4, dropout: float = 0.0
) -> Graph:
    """Return a transformer that predicts the next of a sequence of tokens at each place.

    Parameters
    ----------
    vocabulary : int
        Different tokens.
    length : int
        Tokens of a sample.
    width : int
        Numbers that stand for a token inside.
    heads : int
        Heads of each attention.
    layers : int
        Blocks of attention and two dense layers.
    dropout : float
        Rate of dropout behind the embedding, and at the end of both halves of a block.

    Returns
    -------
    Graph
        Inputs "input" and "target", the tokens that follow; the sum "correct" is of the share of places that are.
    """
    tokens = nn.input((length,), "integer", axes=("token",))
    value = nn.position_embedding(nn.embedding(tokens, vocabulary, width, name="tokens"), name="positions")
    value = _dropped(value, dropout)
    for number in range(1, layers + 1):
        value = _block(value, width, heads, dropout, f"block{number}.")
    scores = nn.dense(nn.layer_norm(value, name="norm"), vocabulary, bias=False, name="head")
    target = nn.target((length,))
    return nn.graph(scores, nn.softmax_cross_entropy(scores, target), {"correct": nn.correct(scores, target)})


def _block(value: nn.Tensor, width: int, heads: int, dropout: float, name: str) -> nn.Tensor:
    """Return causal attention, and then two dense layers, each added to what it takes."""
    normal = nn.layer_norm(value, name=f"{name}norm1")
    parts = [nn.dense(normal, width, name=name + part) for part in ("query", "key", "value")]
    seen = nn.attention(*parts, heads=heads, causal=True, name=f"{name}attention")
    value = value + _dropped(nn.dense(seen, width, name=f"{name}projection"), dropout)
    normal = nn.layer_norm(value, name=f"{name}norm2")
    inner = nn.gelu(nn.dense(normal, 4 * width, name=f"{name}inner"), form="tanh")
    return value + _dropped(nn.dense(inner, width, name=f"{name}outer"), dropout)


def _dropped(value: nn.Tensor, rate: float) -> nn.Tensor:
    return nn.dropout(value, rate) if rate else value


def wide_and_deep(
    numbers: int = 13, categories: Sequence[int] = (100,) * 8, width: int = 16, units: Sequence[int] = (128, 64)
) -> Graph:
    """Return a model of clicks: a linear part, and dense layers over numbers and embeddings of categories.

    Parameters
    ----------
    numbers : int
        Floats of a sample.
    categories : sequence of int
        For each category of a sample, how many values it has.
    width : int
        Numbers that stand for a category in the deep part.
    units : sequence of int
        Units of each hidden layer.

    Returns
    -------
    Graph
        Inputs "input" (floats), "categories" (integers) and "target" (one float, 0 or 1); the loss is binary
        cross-entropy of the score.
    """
    floats = nn.input((numbers,))
    given = nn.input((len(categories),), "integer", name="categories", axes=("token",))
    places = [nn.slice(given, number, number + 1) for number in range(len(categories))]
    linear = [nn.embedding(p, entries, 1, name=f"wide{n}") for n, (p, entries) in enumerate(_pairs(places, categories))]
    tables = [
        nn.embedding(p, entries, width, name=f"deep{n}") for n, (p, entries) in enumerate(_pairs(places, categories))
    ]
    wide = nn.dense(floats, 1, name="wide") + nn.sum(nn.concat(*linear), axes=[0])
    value = nn.concat(floats, nn.flatten(nn.concat(*tables)))
    for number, size in enumerate(units):
        value = nn.relu(nn.dense(value, size, name=f"hidden{number}"))
    score = wide + nn.dense(value, 1, name="deep")
    return nn.graph(score, nn.binary_cross_entropy(score, nn.target((1,), "float")))


def _pairs(places: Sequence[nn.Tensor], categories: Sequence[int]) -> list[tuple[nn.Tensor, int]]:
    return list(zip(places, categories, strict=True))


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
    >>> from adam_mpi import ready_models
    >>> graph = ready_models.unet((1, 16, 16), classes=3, widths=(4, 8))
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
