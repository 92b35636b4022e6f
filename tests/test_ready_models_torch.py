"""Ready models against equal PyTorch modules: loss and gradients."""

import graphs
import numpy as np
import pytest

from adam_mpi import config, ready_models
from adam_mpi.config import models
from adam_mpi.model.executors.generated import GeneratedExecutor
from adam_mpi.model.executors.reference import ReferenceExecutor
from adam_mpi.model.frontends import configured
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat

torch = pytest.importorskip("torch")
from torch.nn import (  # noqa: E402
    LSTM,
    AdaptiveAvgPool2d,
    BatchNorm2d,
    Conv2d,
    ConvTranspose2d,
    Flatten,
    Linear,
    MaxPool2d,
    Module,
    Parameter,
    ReLU,
    Sequential,
    functional,
)


def normed(channels, maps, kernel=3, stride=1, groups=1):
    """Return a convolution without bias, and batch norm."""
    convolution = Conv2d(channels, maps, kernel, stride, kernel // 2, groups=groups, bias=False)
    return Sequential(convolution, BatchNorm2d(maps))


class Residual(Module):
    def __init__(self, channels, maps):
        super().__init__()
        stride = 1 if channels == maps else 2
        self.way = Sequential(normed(channels, maps, stride=stride), ReLU(), normed(maps, maps))
        self.skip = normed(channels, maps, 1, stride) if stride == 2 else Sequential()

    def forward(self, x):
        return functional.relu(self.way(x) + self.skip(x))


def resnet(widths, repeat):
    blocks = [normed(3, widths[0]), ReLU()]
    for before, width in zip(widths[:1] + widths, widths, strict=False):
        blocks += [Residual(before, width), *(Residual(width, width) for _ in range(repeat - 1))]
    return Sequential(*blocks, AdaptiveAvgPool2d(1), Flatten(), Linear(widths[-1], 10))


def vgg():
    blocks = []
    before = 3
    for width in (64, 128, 256):
        blocks += [normed(before, width), ReLU(), normed(width, width), ReLU(), MaxPool2d(2)]
        before = width
    return Sequential(*blocks, Flatten(), Linear(256 * 16, 10))


def mobilenet():
    blocks = [normed(3, 32), ReLU()]
    before = 32
    for width, stride in ((64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), (512, 1)):
        blocks += [normed(before, before, 3, stride, before), ReLU(), normed(before, width, 1), ReLU()]
        before = width
    return Sequential(*blocks, AdaptiveAvgPool2d(1), Flatten(), Linear(before, 10))


class Unet(Module):
    def __init__(self, channels, classes, widths):
        super().__init__()
        self.down = torch.nn.ModuleList(
            twice(before, width) for before, width in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.up = torch.nn.ModuleList()
        for width, before in zip(widths[-2::-1], widths[::-1], strict=False):
            self.up.append(torch.nn.ModuleList([ConvTranspose2d(before, width, 2, 2), twice(2 * width, width)]))
        self.scores = Conv2d(widths[0], classes, 1)

    def forward(self, x):
        skips = []
        for block in self.down[:-1]:
            skips.append(block(x))
            x = functional.max_pool2d(skips[-1], 2)
        x = self.down[-1](x)
        for (larger, block), skip in zip(self.up, reversed(skips), strict=True):
            x = block(torch.cat([skip, larger(x)], dim=1))
        return self.scores(x)


def twice(channels, maps):
    return Sequential(normed(channels, maps), ReLU(), normed(maps, maps), ReLU())


class Speech(Module):
    """Two layers of LSTM and a dense one; parameters are in our order, with one bias per layer."""

    def __init__(self):
        super().__init__()
        self.lstm = [LSTM(40, 128, 2, batch_first=True)]
        shapes = [(512, 40), (512,), (512, 128), (512, 128), (512,), (512, 128), (61, 128), (61,)]
        self.own = torch.nn.ParameterList(Parameter(torch.zeros(shape)) for shape in shapes)

    def forward(self, x):
        names = ["weight_ih_l0", "bias_ih_l0", "weight_hh_l0", "weight_ih_l1", "bias_ih_l1", "weight_hh_l1"]
        given = dict(zip(names, self.own, strict=False)) | {
            f"bias_hh_l{layer}": torch.zeros(512, dtype=x.dtype) for layer in range(2)
        }
        states, _ = torch.func.functional_call(self.lstm[0].to(x.dtype), given, x.reshape(-1, 20, 40))
        return functional.linear(states[:, -1], *self.own[-2:])


MODELS = {
    "resnet20": lambda: resnet((16, 32, 64), 3),
    "resnet18": lambda: resnet((64, 128, 256, 512), 2),
    "vgg-bn": vgg,
    "mobilenet": mobilenet,
    "lstm-speech": Speech,
    "unet": lambda: Unet(3, 2, (32, 64, 128)),
}


def graph_of(name):
    """Return the graph of a ready model, without dropout, which is random."""
    if name == "unet":
        return ready_models.unet((3, 16, 16))
    loaded = config.load(name)
    loaded.model.layers = [entry for entry in loaded.model.layers if "dropout" not in str(entry)]
    if name == "lstm-speech":
        return configured.build(loaded.model, (800, 1, 1), 61, InputFormat("float32"))
    return configured.build(loaded.model, (3, 32, 32), 10, SCALED_BYTES)


def start(graph):
    """Return weights of the size that training begins with, and nothing that is exactly zero or one."""
    random = np.random.default_rng(5)
    parts = []
    for parameter in graph.parameters:
        if parameter.kind == "weight":
            scale = 1 / np.sqrt(parameter.size / parameter.shape[0])
            parts.append(random.uniform(-scale, scale, parameter.size) * 1.7)
        else:
            base = 1.0 if "norm" in parameter.name and parameter.name.endswith(("weight", "variance")) else 0.0
            parts.append(base + 0.1 * random.standard_normal(parameter.size))
    return np.concatenate(parts).astype(np.float32).astype(float)


def expected(graph, module, weights, feed):
    """Return PyTorch's loss, summed over samples, and gradient, in float64; zeros for statistics."""
    module = module.double().train()
    learned = [p for p in graph.parameters if p.kind != "statistic"]
    for ours, theirs in zip(learned, module.parameters(), strict=True):
        begin = graph.offsets[ours.name]
        theirs.data = torch.from_numpy(weights[begin : begin + ours.size].reshape(tuple(theirs.shape)).copy())
    values = torch.from_numpy(feed["input"])
    scores = module(values.double() / 255 if values.dtype == torch.uint8 else values.double())
    losses = functional.cross_entropy(scores, torch.from_numpy(feed["target"]), reduction="none")
    loss = losses.reshape(len(losses), -1).mean(1).sum()
    loss.backward()
    gradient = np.zeros(graph.size)
    for ours, theirs in zip(learned, module.parameters(), strict=True):
        begin = graph.offsets[ours.name]
        gradient[begin : begin + ours.size] = theirs.grad.numpy().ravel()
    return loss.item(), gradient


def check(name, samples, executor_of, tolerance):
    graph = graph_of(name)
    feed = graphs.random_feed(graph, samples, classes=2)
    weights = start(graph)
    loss, gradient = expected(graph, MODELS[name](), weights, feed)
    executor, dtype = executor_of(graph)
    found, sums = graphs.gradient_of(executor, weights.astype(dtype), feed)
    for parameter in graph.parameters:
        if parameter.kind == "statistic":
            found[graph.offsets[parameter.name] :][: parameter.size] = 0
    assert sums["loss"] == pytest.approx(loss, rel=tolerance)
    assert np.linalg.norm(found - gradient) <= tolerance * np.linalg.norm(gradient)


def test_all_ready_graphs_are_compared():
    mentioned = {name for name in models.names() if not configured.is_stack(config.load(name).model)}
    assert set(MODELS) == mentioned | {"unet"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.full] if "18" in name else []) for name in MODELS]
)
def test_reference_in_float64(name):
    check(name, 2, lambda graph: (ReferenceExecutor(graph, dtype=np.float64), np.float64), 1e-9)


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", MODELS)
def test_generated_in_float32(name):
    check(name, 3, lambda graph: (GeneratedExecutor(graph, 3), np.float32), 1e-4)
