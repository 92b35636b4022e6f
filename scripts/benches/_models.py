"""The models that are measured, as layer lists of the configuration; and the same for PyTorch."""

from dataclasses import dataclass
from typing import Any

from adam_mpi.config import LAYERS
from adam_mpi.model import layers
from adam_mpi.model.layers import Activation, Conv, Dense, LayerShape, MaxPool


@dataclass(frozen=True)
class Model:
    shapes: tuple[LayerShape, ...]
    batches: dict[int, float]
    """Batch sizes, each with the least number of times PyTorch's speed that is wanted."""

    @property
    def flops(self) -> float:
        """Of one image in training: forward, to the weights, and to the data of all but the first layer."""
        connections = [shape.connections for shape in self.shapes if shape.weight]
        return 6.0 * sum(connections) - 2 * connections[0]


def _conv(maps: int, kernel: int, pad: int) -> list[Any]:
    return [{"kind": "conv", "channels": maps, "kernel": kernel, "pad": pad}, "relu"]


def _dense(*units: int) -> list[Any]:
    hidden = [entry for count in units[:-1] for entry in ({"kind": "dense", "units": count}, "relu")]
    return [*hidden, {"kind": "dense", "units": units[-1]}]


POOL = {"kind": "max_pool", "size": 2}
ALEXNET = [*_conv(64, 5, 2), POOL, *_conv(128, 3, 1), POOL, *_conv(256, 3, 1), POOL, *_dense(1024, 1024, 100)]
VGG = [
    *_conv(64, 3, 1),
    *_conv(64, 3, 1),
    POOL,
    *_conv(128, 3, 1),
    *_conv(128, 3, 1),
    POOL,
    *_conv(256, 3, 1),
    *_conv(256, 3, 1),
    POOL,
    *_dense(10),
]


def _shapes(entries: list[Any], shape: tuple[int, int, int], classes: int) -> tuple[LayerShape, ...]:
    return layers.infer(layers.parse(entries), shape, classes)


MODELS = {
    "mnist": Model(_shapes(LAYERS, (1, 28, 28), 10), {1: 5.0, 16: 4.0, 64: 3.3, 256: 3.0}),
    "alexnet": Model(_shapes(ALEXNET, (3, 64, 64), 100), {32: 1.7}),
    "vgg": Model(_shapes(VGG, (3, 32, 32), 10), {32: 1.5}),
    "mlp": Model(_shapes(_dense(2048, 2048, 2048, 10), (1, 28, 28), 10), {64: 1.1}),
}


def in_torch(shapes: tuple[LayerShape, ...]) -> Any:
    """The same stack as a torch module."""
    from torch import nn

    modules: list[nn.Module] = []
    for shape in shapes:
        layer = shape.layer
        if isinstance(layer, Conv):
            modules.append(nn.Conv2d(shape.input[0], layer.channels, layer.kernel, layer.stride, layer.pad))
        elif isinstance(layer, MaxPool):
            modules.append(nn.MaxPool2d(layer.size, layer.stride))
        elif isinstance(layer, Dense):
            flat = any(isinstance(module, nn.Flatten) for module in modules)
            modules += [] if flat else [nn.Flatten()]
            modules.append(nn.Linear(shape.weight[1], layer.units))
        else:
            assert layer == Activation("relu")
            modules.append(nn.ReLU())
    return nn.Sequential(*modules)
