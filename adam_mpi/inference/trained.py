"""A trained network: `load(path)` reads it from a run, a snapshot or a file of weights; no MPI, no data set needed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import merge, model_file, snapshot
from adam_mpi.checkpoint.hdf5_file import open_file
from adam_mpi.config import Config, from_toml
from adam_mpi.data.inputs import Inputs
from adam_mpi.model import layers, parameters
from adam_mpi.model.context import Context
from adam_mpi.model.engine.context import EngineContext
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network

INPUT, PROBABILITIES = "input", "probabilities"


def load(path: str | Path) -> "Trained":
    """A trained network from a run directory, a snapshot's folder or a file of weights."""
    file = weights_file(Path(path))
    with open_file(file, model_file.KIND) as opened:
        if model_file.INPUTS not in opened:
            raise UserError(f"{file}: does not say what its network takes; use the version that wrote it")
        config = from_toml(opened.attrs["config"], str(file))
        inputs = _inputs(file, opened)
        group = "ema/" if "ema" in opened else ""
    shapes = shapes_of(config, inputs)
    weights = model_file.read(file, parameters.tensors(shapes), group)
    return Trained(file.parent, config, inputs, shapes, weights)


def _inputs(file: Path, opened: h5py.File) -> Inputs:
    """What the network takes, as the file says it."""
    try:
        return Inputs.from_json(opened[model_file.INPUTS].asstr()[()])
    except (UserError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: {error}") from None


def shapes_of(config: Config, inputs: Inputs) -> tuple[LayerShape, ...]:
    """The layers of a configured network on these inputs."""
    return layers.infer(layers.parse(config.model.layers), inputs.network_shape(config.data.transform), inputs.classes)


def weights_file(path: Path) -> Path:
    """The file with the weights of a run, a snapshot's folder, or itself."""
    if path.is_file():
        return path
    if (path / "weights.h5").exists():
        return path / "weights.h5"
    if (path / snapshot.MANIFEST).exists():
        return path / snapshot.MODEL
    if (path / "snapshots").is_dir():
        return merge.newest(path) / snapshot.MODEL
    raise UserError(f"{path}: no weights; give a run directory, a snapshot or a file of weights")


class Trained:
    """A network with its weights; `directory` is where they come from."""

    def __init__(
        self, directory: Path, config: Config, inputs: Inputs, shapes: Sequence[LayerShape], weights: np.ndarray
    ) -> None:
        self.directory, self.config, self.inputs = directory, config, inputs
        self.shapes, self.weights = tuple(shapes), weights

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """The weights by name: `conv1/weight`, `conv1/bias` ..."""
        return parameters.views(self.weights, parameters.tensors(self.shapes))

    @property
    def names(self) -> list[str]:
        """What the classes are called: their numbers, where the data set has no names for them."""
        return list(self.inputs.names) or [str(number) for number in range(self.inputs.classes)]

    @property
    def summary(self) -> dict[str, Any]:
        """The run's summary.json; empty where there is none beside the weights."""
        file = self.directory / "summary.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Probabilities (images, classes); images are given as they are in the data set."""
        images, batch = self._prepared(images), self.config.train.batch
        blocks = [self._context.predict(self.weights, images[i : i + batch]) for i in range(0, len(images), batch)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.inputs.classes), np.float32)

    def run(self, feed: Mapping[str, np.ndarray], fetch: Iterable[str]) -> list[np.ndarray]:
        """The outputs of the layers in `fetch`, where `feed` gives those of some: as a rule of "input", the images.

        Outputs are (images, channels, rows, columns); "probabilities" is what follows the last layer.

            filters, probabilities = model.run(feed={"input": images}, fetch=["relu1", "probabilities"])
            probabilities, = model.run(feed={"dense1": activations}, fetch=["probabilities"])
        """
        feed, fetch = {name: np.asarray(values) for name, values in feed.items()}, list(fetch)
        self._check(feed, fetch)
        count, batch = len(next(iter(feed.values()))), self.config.train.batch
        blocks = [
            self._run({name: values[first : first + batch] for name, values in feed.items()}, fetch)
            for first in range(0, max(count, 1), batch)
        ]
        return [np.concatenate(pieces) for pieces in zip(*blocks, strict=True)]

    @cached_property
    def _context(self) -> Context | EngineContext:
        """As in training, so that kernels compiled there are found in the cache; numbers are left to the reference."""
        pixels = self.inputs.dtype == "uint8" and not self.inputs.mean
        engine = self.config.kernels.engine if pixels else "reference"
        return Network(self.shapes, self.config.train.batch, self.config.run.seed, engine=engine).context()

    @cached_property
    def _stepwise(self) -> Context:
        return Context(self.shapes, self.config.train.batch, self.config.run.seed, np.float32)

    def _prepared(self, images: np.ndarray) -> np.ndarray:
        return self.inputs.prepare(np.asarray(images), self.config.data.transform)

    def _check(self, feed: Mapping[str, np.ndarray], fetch: Sequence[str]) -> None:
        known = [INPUT, *(shape.name for shape in self.shapes), PROBABILITIES]
        for name in [*feed, *fetch]:
            if name not in known:
                raise UserError(f"{name}: not a layer of this model; it has {', '.join(known)}")
        if len({len(values) for values in feed.values()}) != 1:
            raise UserError("feed: give at least one array, and as many images in each")
        order = [known.index(name) for name in feed]
        if missing := [name for name in fetch if known.index(name) < min(order)]:
            raise UserError(f"{missing[0]}: comes before all that is fed; feed input, or a layer before it")

    def _run(self, feed: Mapping[str, np.ndarray], fetch: Sequence[str]) -> list[np.ndarray]:
        """One block, layer by layer; layers that work in place overwrite the one before, so each is copied at once."""
        context, views = self._stepwise, self.tensors
        known, count, found = INPUT in feed, len(next(iter(feed.values()))), {}
        if known:
            context.load(self._prepared(feed[INPUT]))
            found[INPUT] = _images(context.arrays["input"], count)
        for shape, outputs, infer in zip(self.shapes, context.outputs, context.inference, strict=True):
            if known:
                infer(views)
            if shape.name in feed:
                outputs[..., :count] = np.moveaxis(_shaped(shape, feed[shape.name]), 0, -1)
                known = True
            if shape.name in fetch:
                found[shape.name] = _images(outputs, count)
        found[PROBABILITIES] = context.probabilities(count)
        return [found[name] for name in fetch]


def _images(outputs: np.ndarray, count: int) -> np.ndarray:
    return np.moveaxis(outputs[..., :count], -1, 0).copy()


def _shaped(shape: LayerShape, values: np.ndarray) -> np.ndarray:
    try:
        return values.reshape(len(values), *shape.output)
    except ValueError:
        wanted = "x".join(map(str, shape.output))
        raise UserError(f"feed {shape.name}: values of {values.shape[1:]} per image; its output is {wanted}") from None
