"""The layers of a model: their specs, read from the config, and the shapes that they have in one stack."""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields

from adam_mpi.base.errors import UserError
from adam_mpi.model.exchange import Exchange

FUNCTIONS = ("relu", "tanh", "sigmoid")


@dataclass(frozen=True)
class Conv:
    """Square convolution."""

    channels: int
    kernel: int
    stride: int = 1
    pad: int = 0


@dataclass(frozen=True)
class MaxPool:
    """Square max pooling without padding; windows may overlap, and an incomplete last window is left out."""

    size: int
    stride: int = field(default=None)  # type: ignore[assignment]

    def __post_init__(self) -> None:
        if self.stride is None:
            object.__setattr__(self, "stride", self.size)


@dataclass(frozen=True)
class AvgPool(MaxPool):
    """Square average pooling, with the windows of max pooling."""


@dataclass(frozen=True)
class LocalResponseNorm:
    """Local response normalization: divide by (offset + scale / size * sum of squares of `size` channels) ** power."""

    size: int = 5
    offset: float = 2.0
    scale: float = 1e-4
    power: float = 0.75


@dataclass(frozen=True)
class Dense:
    """Fully-connected layer over the flattened input."""

    units: int


@dataclass(frozen=True)
class Activation:
    """One of FUNCTIONS, applied to each element."""

    function: str


@dataclass(frozen=True)
class Dropout:
    """Zero a share `rate` of the units in training, and scale the others by 1 / (1 - rate)."""

    rate: float


Layer = Conv | MaxPool | LocalResponseNorm | Dense | Activation | Dropout | Exchange
Shape = tuple[int, int, int]
KINDS: dict[str, type] = {
    "conv": Conv,
    "max_pool": MaxPool,
    "avg_pool": AvgPool,
    "lrn": LocalResponseNorm,
    "dense": Dense,
    "dropout": Dropout,
}


@dataclass(frozen=True)
class Extent:
    """A strip's part of a layer: `width` columns (or units) of its output from `first` on, of `whole` ones."""

    first: int
    width: int
    whole: int
    left: int = 0
    right: int = 0
    """Columns of padding that a convolution sees beside its input: none on the side of a neighbor."""


@dataclass(frozen=True)
class LayerShape:
    """A layer with its name and the shapes that it has in one stack: input and output are (channels, rows, columns)."""

    name: str
    layer: Layer
    input: Shape
    output: Shape
    weight: tuple[int, ...] | None = None
    bias: tuple[int, ...] | None = None
    extent: Extent | None = None
    """The part of the layer that a strip has; None for the whole layer."""

    @property
    def margins(self) -> tuple[int, int]:
        """Return the columns of padding left and right of a convolution's input."""
        pad = self.layer.pad if isinstance(self.layer, Conv) else 0
        return (self.extent.left, self.extent.right) if self.extent else (pad, pad)

    @property
    def within(self) -> tuple[int, int, int]:
        """Return (first, width, whole) of the extent; of a whole layer all units."""
        if self.extent:
            return self.extent.first, self.extent.width, self.extent.whole
        units = math.prod(self.output)
        return 0, units, units

    @property
    def parameters(self) -> int:
        """Return the number of values of weight and bias together."""
        return sum(math.prod(shape) for shape in (self.weight, self.bias) if shape)

    @property
    def connections(self) -> int:
        """Return the multiply-adds per image: every weight is used once at each output position."""
        _, rows, columns = self.output
        return math.prod(self.weight) * rows * columns if self.weight else 0


def missing_rule(layer: object, rule: str) -> NotImplementedError:
    """Return the error for a kind of layer, or an activation function, that lacks `rule`."""
    name = f"activation {layer.function!r}" if isinstance(layer, Activation) else type(layer).__name__
    return NotImplementedError(
        f'{name} has no {rule}; see "A layer" in docs/howto/extending.md for all that a layer needs'
    )


def parse(entries: object) -> tuple[Layer, ...]:
    """Return the layers of the config's list, whose entries are like "relu" or {"kind": "dense", "units": 10}.

    Raises UserError for an entry that is no layer.
    """
    if not isinstance(entries, list | tuple):
        raise UserError(f"model.layers is {entries!r}; give a list of layers")
    return tuple(_layer(f"model.layers[{index}]", entry) for index, entry in enumerate(entries))


RENAMED_KINDS = {"pool": "max_pool", "average": "avg_pool"}
RENAMED_FIELDS = {"maps": "channels"}
"""Former names of kinds and fields of layers -> their present names, which errors about the former ones give."""


def _layer(key: str, entry: object) -> Layer:
    """Return the layer that `entry` describes; raise UserError, with `key`, for a kind or field that is not known."""
    if isinstance(entry, str):
        if entry not in FUNCTIONS:
            raise UserError(f"{key} is {entry!r}; allowed are {', '.join(FUNCTIONS)}, or a table with a kind")
        return Activation(entry)
    if not isinstance(entry, dict):
        raise UserError(f"{key} is {entry!r}; give one of {', '.join(FUNCTIONS)}, or a table with a kind")
    kind = entry.get("kind")
    if isinstance(kind, str) and kind in RENAMED_KINDS:
        raise UserError(f"{key}.kind {kind!r} is now {RENAMED_KINDS[kind]!r}; use the new name")
    if not isinstance(kind, str) or kind not in KINDS:
        given = repr(kind) if "kind" in entry else "missing"
        raise UserError(f"{key}.kind is {given}; allowed are {', '.join(KINDS)}")
    return _build(key, kind, {name: value for name, value in entry.items() if name != "kind"})


def _build(key: str, kind: str, values: dict[str, object]) -> Layer:
    allowed = {known.name: known for known in fields(KINDS[kind])}
    for name in values:
        if RENAMED_FIELDS.get(name) in allowed:
            raise UserError(f"{key}.{name} is now {key}.{RENAMED_FIELDS[name]}; use the new name")
        if name not in allowed:
            raise UserError(f"{key}.{name} is not known; a {kind} layer has {', '.join(allowed)}")
    for name, known in allowed.items():
        if name in values:
            _check(f"{key}.{name}", name, values[name])
        elif known.default is MISSING:
            raise UserError(f"{key}.{name} is missing; a {kind} layer needs it")
    layer = KINDS[kind](**values)
    # A wider pad would make outputs that see nothing of the input.
    if isinstance(layer, Conv) and layer.pad >= layer.kernel:
        raise UserError(f"{key}.pad is {layer.pad}; a kernel of {layer.kernel} allows at most {layer.kernel - 1}")
    return layer


def _check(key: str, name: str, value: object) -> None:
    """Raise UserError unless `value` is allowed for a layer's field `name`; `key` is its place in the config."""
    if name == "rate":
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
            raise UserError(f"{key} is {value!r}; give a number from 0 up to, but not including, 1")
        return
    if name in ("offset", "scale", "power"):
        number = value if isinstance(value, int | float) and not isinstance(value, bool) else -1
        if number < 0 or (name == "offset" and not number):
            raise UserError(f"{key} is {value!r}; give a number, {'above 0' if name == 'offset' else '0 or more'}")
        return
    lowest = 0 if name == "pad" else 1
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise UserError(f"{key} is {value!r}; give a whole number, {lowest} or more")


def infer(layers: Sequence[Layer], input_shape: Shape, classes: int) -> tuple[LayerShape, ...]:
    """Name the layers and follow the shapes through the stack, from the input image to one unit per class.

    Raises UserError for a stack that does not fit together.
    """
    _check_last(layers, classes)
    shapes: list[LayerShape] = []
    numbers: Counter[str] = Counter()
    shape = input_shape
    flat = False
    for index, layer in enumerate(layers):
        kind = _kind(layer)
        numbers[kind] += 1
        name = f"{kind}{numbers[kind]}"
        if flat and isinstance(layer, Conv | MaxPool | LocalResponseNorm):
            raise UserError(f"model.layers[{index}] ({name}) comes after a dense layer; put it before the first one")
        shapes.append(_infer(f"model.layers[{index}]", name, layer, shape))
        shape = shapes[-1].output
        flat = flat or isinstance(layer, Dense)
    return tuple(shapes)


def _kind(layer: Layer) -> str:
    """Return the config's word for `layer`."""
    if isinstance(layer, Activation):
        return layer.function
    for kind, known in KINDS.items():
        if type(layer) is known:
            return kind
    raise missing_rule(layer, "kind (KINDS in model/layers.py)")


def _check_last(layers: Sequence[Layer], classes: int) -> None:
    """Raise UserError unless the last layer is dense and has a unit for each of `classes`."""
    wanted = f'{{kind = "dense", units = {classes}}}'
    if not layers:
        raise UserError(f"model.layers is empty; give at least {wanted}")
    last = layers[-1]
    key = f"model.layers[{len(layers) - 1}]"
    if not isinstance(last, Dense):
        raise UserError(f"{key} is the last layer and must be dense, one unit per class; add {wanted} after it")
    if last.units != classes:
        raise UserError(f"{key}.units is {last.units}; the last layer has one unit per class, set it to {classes}")


def _infer(key: str, name: str, layer: Layer, shape: Shape) -> LayerShape:
    """Return `layer` with the shapes that it has for an input of `shape`; `key` is its place in the config."""
    channels, rows, columns = shape
    if isinstance(layer, Conv):
        _check_fits(f"{key}.kernel", name, layer.kernel, layer.pad, shape)
        windows = _windows(rows + 2 * layer.pad, columns + 2 * layer.pad, layer.kernel, layer.stride)
        kernels = (layer.channels, channels, layer.kernel, layer.kernel)
        return LayerShape(name, layer, shape, (layer.channels, *windows), weight=kernels, bias=(layer.channels,))
    if isinstance(layer, MaxPool):
        _check_fits(f"{key}.size", name, layer.size, 0, shape)
        return LayerShape(name, layer, shape, (channels, *_windows(rows, columns, layer.size, layer.stride)))
    if isinstance(layer, Dense):
        matrix = (layer.units, math.prod(shape))
        return LayerShape(name, layer, shape, (layer.units, 1, 1), weight=matrix, bias=(layer.units,))
    if isinstance(layer, LocalResponseNorm | Activation | Dropout):
        return LayerShape(name, layer, shape, shape)
    raise missing_rule(layer, "shape rule (_infer in model/layers.py)")


def _windows(rows: int, columns: int, size: int, stride: int) -> tuple[int, int]:
    """Return how many windows of `size` fit down and across."""
    return (rows - size) // stride + 1, (columns - size) // stride + 1


def _check_fits(key: str, name: str, window: int, pad: int, shape: Shape) -> None:
    """Raise UserError when a `window` is larger than the padded input of `shape`."""
    smallest = min(shape[1:]) + 2 * pad
    if window > smallest:
        given = f"{shape[1]}x{shape[2]}" + (f" with pad {pad}" if pad else "")
        raise UserError(f"{key} ({name}) is {window}, but its input is {given}; give at most {smallest}")
