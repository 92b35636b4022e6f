"""Random models: a list of steps that is built with `adam_mpi.nn`, and computed with PyTorch."""

from dataclasses import dataclass, field

import numpy as np

from adam_mpi import nn

ACTIVATIONS = ("relu", "tanh", "sigmoid", "silu", "gelu")
CLASSES = 4


@dataclass(frozen=True)
class Step:
    """Apply `kind` with `fields` to earlier values, by number; `layer` names whose parameters it has."""

    kind: str
    inputs: tuple[int, ...]
    fields: dict = field(default_factory=dict)
    layer: str = ""


@dataclass(frozen=True)
class Term:
    """A loss of value `number`, of a kind, with a weight."""

    kind: str
    number: int
    weight: float
    name: str


class Program:
    """A random model: value 0 is its input; steps make the others; several losses."""

    def __init__(self, seed, steps=14):
        self.random = np.random.default_rng(seed)
        self.shapes = [(int(self.random.integers(1, 5)), *self.random.integers(4, 8, 2).tolist())]
        self.steps = []
        self.layers = {}
        while len(self.steps) < steps:
            self.add()
        self.losses = [self.loss(number) for number in range(1 + seed % 3)]

    def add(self):
        """Add a step to values that fit, if there are any."""
        kinds = [self.conv, self.conv, self.again, self.activation, self.skip, self.join, self.pool, self.resize]
        kinds += [self.gate, self.part, self.turn, self.dense, self.squeeze]
        made = kinds[self.random.integers(len(kinds))]()
        if made is not None:
            step, shape = made
            self.steps.append(step)
            self.shapes.append(shape)

    def pick(self, fits):
        """Return the number of a value whose shape fits, recent ones more often; None if there is none."""
        found = [number for number, shape in enumerate(self.shapes) if fits(shape)]
        if not found:
            return None
        return found[max(len(found) - 1 - int(self.random.exponential(1.5)), 0)]

    def name(self):
        return f"layer{len(self.steps)}"

    def conv(self):
        number = self.pick(lambda shape: len(shape) == 3)
        channels, *sizes = self.shapes[number]
        groups = channels if self.random.random() < 0.3 else 1
        maps = groups * int(self.random.integers(1, 4)) if groups == 1 else channels
        kernel = self.random.integers(1, 4, 2).tolist()
        pad = [kernel[0] // 2, kernel[1] // 2, (kernel[0] - 1) // 2, (kernel[1] - 1) // 2]
        stride = int(self.random.integers(1, 3)) if min(sizes) > 3 else 1
        fields = {"channels": maps, "kernel": kernel, "pad": pad, "stride": stride, "groups": groups}
        shape = (maps, *(-(-size // stride) for size in sizes))
        name = self.name()
        self.layers[name] = ("conv", fields, self.shapes[number][0], shape)
        return Step("conv", (number,), fields, name), shape

    def again(self):
        """Apply a convolution again, to another value with as many channels."""
        if not self.layers:
            return None
        name = list(self.layers)[self.random.integers(len(self.layers))]
        kind, fields, channels, _ = self.layers[name]
        number = self.pick(lambda shape: len(shape) == 3 and shape[0] == channels)
        sizes = (-(-size // fields["stride"]) for size in self.shapes[number][1:])
        return Step(kind, (number,), fields, name), (fields["channels"], *sizes)

    def activation(self):
        number = self.pick(lambda shape: True)
        return Step(ACTIVATIONS[self.random.integers(len(ACTIVATIONS))], (number,)), self.shapes[number]

    def skip(self):
        number = self.pick(lambda shape: True)
        other = self.pick(lambda shape: shape == self.shapes[number])
        return Step("add", (number, other)), self.shapes[number]

    def gate(self):
        number = self.pick(lambda shape: True)
        other = self.pick(lambda shape: shape == self.shapes[number])
        return Step("gate", (number, other)), self.shapes[number]

    def join(self):
        number = self.pick(lambda shape: shape[0] < 9)
        other = self.pick(lambda shape: shape[1:] == self.shapes[number][1:] and shape[0] < 9)
        shape = (self.shapes[number][0] + self.shapes[other][0], *self.shapes[number][1:])
        return Step("concat", (number, other)), shape

    def part(self):
        number = self.pick(lambda shape: shape[0] > 1)
        if number is None:
            return None
        stop = int(self.random.integers(1, self.shapes[number][0]))
        return Step("slice", (number,), {"start": 0, "stop": stop}), (stop, *self.shapes[number][1:])

    def turn(self):
        number = self.pick(lambda shape: len(shape) == 3)
        channels, rows, columns = self.shapes[number]
        return Step("transpose", (number,)), (channels, columns, rows)

    def pool(self):
        number = self.pick(lambda shape: len(shape) == 3 and min(shape[1:]) > 1)
        if number is None:
            return None
        channels, *sizes = self.shapes[number]
        kind = ("max_pool", "avg_pool")[self.random.integers(2)]
        return Step(kind, (number,), {"size": 2}), (channels, *(size // 2 for size in sizes))

    def resize(self):
        number = self.pick(lambda shape: len(shape) == 3 and max(shape[1:]) < 5)
        if number is None:
            return None
        channels, *sizes = self.shapes[number]
        mode = ("nearest", "bilinear")[self.random.integers(2)]
        return Step("upsample", (number,), {"mode": mode}), (channels, *(2 * size for size in sizes))

    def squeeze(self):
        number = self.pick(lambda shape: len(shape) == 3)
        return Step("global_avg_pool", (number,)), self.shapes[number][:1]

    def dense(self):
        number = self.pick(lambda shape: True)
        units = int(self.random.integers(1, 7))
        return Step("dense", (number,), {"units": units}, self.name()), (units,)

    def loss(self, number):
        # The first one has parameters, so that there is something to train.
        kind = ("softmax_cross_entropy", "mean_squared_error", "square")[self.random.integers(2 if number == 0 else 3)]
        value = len(self.shapes) - 1 if number == 0 else self.pick(lambda shape: True)
        return Term(kind, value, float(self.random.uniform(0.2, 2)), f"loss{number}")

    def graph(self):
        """Return the model as a graph."""
        values = [nn.input(self.shapes[0])]
        layers = {}
        for step in self.steps:
            values.append(_built(step, [values[number] for number in step.inputs], layers))
        return nn.graph(values[-1], [(_built_loss(term, values[term.number]), term.weight) for term in self.losses])

    def reached(self):
        """Return the numbers of the values, apart from the input, that losses depend on."""
        found = set()
        ends = [term.number for term in self.losses]
        while ends:
            number = ends.pop()
            if number and number not in found:
                found.add(number)
                ends += self.steps[number - 1].inputs
        return found

    def torch(self, tensors, parameters):
        """Return the loss that PyTorch computes of `tensors`, summed over samples."""
        import torch

        values = {0: tensors["input"]}
        for made in sorted(self.reached()):
            step = self.steps[made - 1]
            own = {n.rpartition("/")[2]: p for n, p in parameters.items() if n.startswith(f"{step.layer}/")}
            values[made] = _computed(step, [values[number] for number in step.inputs], own)
        total = torch.zeros((), dtype=values[0].dtype)
        for term in self.losses:
            total = total + term.weight * _computed_loss(term, values[term.number], tensors, parameters)
        return total


def _built(step, inputs, layers):
    if step.kind == "gate":
        return nn.elementwise(lambda a, b: a * nn.sigmoid(b), *inputs)
    fields = {"order": [0, 2, 1]} if step.kind == "transpose" else step.fields
    if step.layer:
        layer = layers.setdefault(step.layer, nn.Layer(step.kind, name=step.layer, **fields))
        return layer(*inputs)
    return getattr(nn, step.kind)(*inputs, **fields)


def _built_loss(term, value):
    if term.kind == "square":
        return nn.mean(nn.elementwise(lambda v: v * v, value))
    scores = nn.dense(value, CLASSES, name=term.name)
    if term.kind == "softmax_cross_entropy":
        return nn.softmax_cross_entropy(scores, nn.target(name=f"{term.name}_target"))
    return nn.mean_squared_error(scores, nn.target((CLASSES,), "float", name=f"{term.name}_target"))


def _computed(step, inputs, own):
    import torch
    from torch.nn import functional

    fields = step.fields
    plain = {
        "add": lambda a, b: a + b,
        "gate": lambda a, b: a * torch.sigmoid(b),
        "concat": lambda a, b: torch.cat([a, b], dim=1),
        "slice": lambda a: a[:, fields["start"] : fields["stop"]],
        "transpose": lambda a: a.transpose(2, 3),
        "max_pool": lambda a: functional.max_pool2d(a, 2),
        "avg_pool": lambda a: functional.avg_pool2d(a, 2),
        "global_avg_pool": lambda a: a.mean((2, 3)),
        "dense": lambda a: functional.linear(a.flatten(1), own["weight"], own["bias"]),
        "conv": lambda a: _convolved(a, fields, own),
        "upsample": lambda a: _resized(a, fields["mode"]),
    }
    if step.kind in plain:
        return plain[step.kind](*inputs)
    return getattr(torch if step.kind in ("tanh", "sigmoid") else functional, step.kind)(*inputs)


def _convolved(value, fields, own):
    from torch.nn import functional

    top, left, bottom, right = fields["pad"]
    padded = functional.pad(value, (left, right, top, bottom))
    return functional.conv2d(padded, own["weight"], own["bias"], fields["stride"], groups=fields["groups"])


def _resized(value, mode):
    from torch.nn import functional

    options = {"align_corners": False} if mode == "bilinear" else {}
    return functional.interpolate(value, scale_factor=2, mode=mode, **options)


def _computed_loss(term, value, tensors, parameters):
    from torch.nn import functional

    if term.kind == "square":
        return (value * value).flatten(1).mean(1).sum()
    scores = functional.linear(value.flatten(1), parameters[f"{term.name}/weight"], parameters[f"{term.name}/bias"])
    target = tensors[f"{term.name}_target"]
    if term.kind == "softmax_cross_entropy":
        return functional.cross_entropy(scores, target, reduction="sum")
    return ((scores - target) ** 2).mean(1).sum()
