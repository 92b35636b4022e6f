"""A trained network, read from a run, a snapshot or a file of weights; neither MPI nor the data set is needed."""

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file, snapshot
from adam_mpi.checkpoint.hdf5_file import open_file
from adam_mpi.config import Config, from_toml
from adam_mpi.data.inputs import Inputs
from adam_mpi.model import parameters
from adam_mpi.model.engine.engine_context import EngineContext
from adam_mpi.model.executors.reference import ReferenceExecutor
from adam_mpi.model.frontends import configured
from adam_mpi.model.graph_context import GraphContext
from adam_mpi.model.graph_layers import GraphLayers
from adam_mpi.model.layers import LayerShape
from adam_mpi.model.network import Network
from adam_mpi.model.reference_context import Context

INPUT = "input"
PROBABILITIES = "probabilities"


def load(path: str | Path) -> "Trained":
    """Load a trained network.

    Where training kept a running average of the weights (`optimizer.ema`), the averaged weights are loaded.

    Parameters
    ----------
    path : str or pathlib.Path
        A run directory, a snapshot's folder, or a file of weights. Of a run that was interrupted, the newest snapshot
        is loaded.

    Returns
    -------
    Trained
        The network with its weights.

    Raises
    ------
    UserError
        If there are no weights at `path`, they are damaged, or their format is of another version.

    Examples
    --------
    >>> import adam_mpi
    >>> model = adam_mpi.load("runs/small")  # written by adam_mpi.train(run="runs/small")
    >>> [shape.name for shape in model.shapes]
    ['dense1']
    """
    file = weights_file(Path(path))
    with open_file(file, model_file.KIND) as opened:
        if model_file.INPUTS not in opened:
            raise UserError(f"{file}: does not describe the inputs of its network; use the version that wrote it")
        config = from_toml(opened.attrs["config"], str(file))
        inputs = _read_inputs(file, opened)
        group = "ema/" if "ema" in opened else ""
    shapes = infer_shapes(config, inputs)
    weights = model_file.read_model(file, parameters.tensors(shapes), group)
    return Trained(file.parent, config, inputs, shapes, weights)


def _read_inputs(file: Path, opened: h5py.File) -> Inputs:
    """Return the description of a trained network's inputs in an opened file of weights."""
    try:
        return Inputs.from_json(opened[model_file.INPUTS].asstr()[()])
    except (UserError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"{file}: {error}") from None


def infer_shapes(config: Config, inputs: Inputs) -> tuple[LayerShape, ...]:
    """Return the layers of the trained network that is configured, with their shapes on `inputs`."""
    return configured.infer(config.model, inputs.network_shape(config.data.transform), inputs.classes, inputs.form)


def weights_file(path: Path) -> Path:
    """Return the file with a trained network's weights, of a run or of a snapshot, or `path` itself if it is one."""
    if path.is_file():
        return path
    if (path / "weights.h5").exists():
        return path / "weights.h5"
    if (path / snapshot.MANIFEST).exists():
        return path / snapshot.MODEL
    if (path / "snapshots").is_dir():
        return model_file.newest_snapshot(path) / snapshot.MODEL
    raise UserError(f"{path}: no weights; give a run directory, a snapshot or a file of weights")


class Trained:
    """A network with its weights; `load` and `train` return one.

    Attributes
    ----------
    directory : pathlib.Path
        The folder of the file that the weights were read from.
    config : Config
        The configuration that the network was trained with.
    inputs : Inputs
        Shape, type and classes of the images that the network takes.
    shapes : tuple of LayerShape
        The layers with the shapes of their inputs and outputs, in order.
    weights : numpy.ndarray
        All parameters as one float32 vector; `tensors` has views of it by name.

    Examples
    --------
    >>> import numpy as np
    >>> import adam_mpi
    >>> model = adam_mpi.load("runs/small")
    >>> probabilities = model.predict(np.zeros((2, 28, 28), np.uint8))
    >>> probabilities.shape, model.names[3]
    ((2, 10), '3')
    """

    def __init__(
        self, directory: Path, config: Config, inputs: Inputs, shapes: Sequence[LayerShape], weights: np.ndarray
    ) -> None:
        self.directory = directory
        self.config = config
        self.inputs = inputs
        self.shapes = shapes if isinstance(shapes, GraphLayers) else tuple(shapes)
        self.weights = weights

    @property
    def tensors(self) -> dict[str, np.ndarray]:
        """Return the weights of the trained network by name (`conv1/weight`, ...), as views of `weights`."""
        return parameters.views(self.weights, parameters.tensors(self.shapes))

    @property
    def names(self) -> list[str]:
        """Return the names of the trained network's classes; their numbers where the data set has no names."""
        return list(self.inputs.names) or [str(number) for number in range(self.inputs.classes)]

    @property
    def summary(self) -> dict[str, Any]:
        """Return the content of summary.json of the run that trained the network; empty without one."""
        file = self.directory / "summary.json"
        return json.loads(file.read_text()) if file.exists() else {}

    def predict(self, images: np.ndarray) -> np.ndarray:
        """Compute the probability of each class for each image with the trained network.

        Parameters
        ----------
        images : numpy.ndarray
            Images as they are in the data set: (images, channels, rows, columns), or with the channels last, or gray
            images without channels.

        Returns
        -------
        numpy.ndarray
            Probabilities, float32 of shape (images, classes).

        Raises
        ------
        UserError
            If type or shape of the images are not those that the network takes.

        Examples
        --------
        >>> import numpy as np
        >>> import adam_mpi
        >>> model = adam_mpi.load("runs/small")
        >>> model.predict(np.zeros((5, 1, 28, 28), np.uint8)).shape
        (5, 10)
        """
        prepared = self._prepare(images)
        batch = self.config.train.batch
        blocks = [self._context.predict(self.weights, prepared[i : i + batch]) for i in range(0, len(prepared), batch)]
        return np.concatenate(blocks) if blocks else np.empty((0, self.inputs.classes), np.float32)

    def run(self, feed: Mapping[str, np.ndarray], fetch: Iterable[str]) -> list[np.ndarray]:
        """Compute the outputs of some layers of the trained network from images, or from outputs of earlier layers.

        Parameters
        ----------
        feed : dict of str to numpy.ndarray
            Values by name: images as "input", or the output of a layer, which then replaces what the layer computes.
        fetch : iterable of str
            Names of layers to return the outputs of; "probabilities" is what follows the last layer.

        Returns
        -------
        list of numpy.ndarray
            The outputs in the order of `fetch`, each (images, channels, rows, columns); probabilities are (images,
            classes).

        Raises
        ------
        UserError
            If a name is unknown, a fed array has the wrong shape, or a layer in `fetch` comes before all that is fed.

        Examples
        --------
        >>> import numpy as np
        >>> import adam_mpi
        >>> model = adam_mpi.load("runs/small")
        >>> images = np.zeros((2, 28, 28), np.uint8)
        >>> logits, probabilities = model.run(feed={"input": images}, fetch=["dense1", "probabilities"])
        >>> logits.shape
        (2, 10, 1, 1)
        >>> (again,) = model.run(feed={"dense1": logits}, fetch=["probabilities"])
        >>> bool((again == probabilities).all())
        True
        """
        arrays = {name: np.asarray(values) for name, values in feed.items()}
        wanted = list(fetch)
        if isinstance(self.shapes, GraphLayers):
            return self._run_graph(self.shapes, arrays, wanted)
        self._check_fetch(arrays, wanted)
        count = len(next(iter(arrays.values())))
        batch = self.config.train.batch
        blocks = [
            self._run_batch({name: values[first : first + batch] for name, values in arrays.items()}, wanted)
            for first in range(0, max(count, 1), batch)
        ]
        return [np.concatenate(pieces) for pieces in zip(*blocks, strict=True)]

    def _run_graph(self, layers: GraphLayers, feed: Mapping[str, np.ndarray], fetch: Sequence[str]) -> list[np.ndarray]:
        """Return values of a graph by name, from what is fed for its inputs."""
        graph = layers.graph
        arrays = {name: self._prepare(values) if name == layers.fed.name else values for name, values in feed.items()}
        names = [graph.outputs[0] if name == PROBABILITIES else name for name in fetch]
        found = ReferenceExecutor(graph, self.config.run.seed).run(self.weights, arrays, names)
        return [found[name] for name in names]

    @cached_property
    def _context(self) -> Context | EngineContext | GraphContext:
        """Return the context that computes the trained network with the kernels that training used."""
        config = self.config
        return Network(
            self.shapes, config.train.batch, config.run.seed, engine=config.kernels.engine, form=self.inputs.form
        ).context()

    @cached_property
    def _stepwise(self) -> Context:
        """Return the reference context of the trained network, which runs layer by layer."""
        config = self.config
        return Context(self.shapes, config.train.batch, config.run.seed, np.float32, form=self.inputs.form)

    def _prepare(self, images: np.ndarray) -> np.ndarray:
        """Return `images` as the trained network takes them; raise UserError if they cannot be."""
        return self.inputs.prepare(np.asarray(images), self.config.data.transform)

    def _check_fetch(self, feed: Mapping[str, np.ndarray], fetch: Sequence[str]) -> None:
        """Raise UserError unless the trained network can compute everything in `fetch` from `feed`."""
        known = [INPUT, *(shape.name for shape in self.shapes), PROBABILITIES]
        for name in [*feed, *fetch]:
            if name not in known:
                raise UserError(f"{name}: not a layer of this model; it has {', '.join(known)}")
        if len({len(values) for values in feed.values()}) != 1:
            raise UserError("feed: give at least one array, and as many images in each")
        order = [known.index(name) for name in feed]
        if missing := [name for name in fetch if known.index(name) < min(order)]:
            raise UserError(f"{missing[0]}: comes before all that is fed; feed input, or a layer before it")

    def _run_batch(self, feed: Mapping[str, np.ndarray], fetch: Sequence[str]) -> list[np.ndarray]:
        """Return the trained network's outputs in `fetch` for at most one batch of images."""
        context = self._stepwise
        views = self.tensors
        known = INPUT in feed
        count = len(next(iter(feed.values())))
        found = {}
        if known:
            context.load(self._prepare(feed[INPUT]))
            found[INPUT] = _copy_images(context.arrays["input"], count)
        for shape, outputs, infer in zip(self.shapes, context.outputs, context.inference, strict=True):
            if known:
                infer(views)
            if shape.name in feed:
                outputs[..., :count] = np.moveaxis(_reshape(shape, feed[shape.name]), 0, -1)
                known = True
            if shape.name in fetch:
                # Now, because a layer that works in place overwrites the output of the layer before it.
                found[shape.name] = _copy_images(outputs, count)
        found[PROBABILITIES] = context.outputs_of(count)
        return [found[name] for name in fetch]


def _copy_images(outputs: np.ndarray, count: int) -> np.ndarray:
    """Return a copy of the first `count` images of a layer's `outputs`, which has them innermost, images first."""
    return np.moveaxis(outputs[..., :count], -1, 0).copy()


def _reshape(shape: LayerShape, values: np.ndarray) -> np.ndarray:
    """Return `values` in the output shape of a trained network's layer; raise UserError if they do not fit."""
    try:
        return values.reshape(len(values), *shape.output)
    except ValueError:
        wanted = "x".join(map(str, shape.output))
        raise UserError(f"feed {shape.name}: values of {values.shape[1:]} per image; its output is {wanted}") from None
