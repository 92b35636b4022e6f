"""A network ready to run: its shapes, the engine that computes them, and the contexts that hold a block of images."""

from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike

from adam_mpi.base import machine
from adam_mpi.model import parameters, reference_buffers
from adam_mpi.model.engine import jit, program
from adam_mpi.model.engine.engine_context import EngineContext, EngineStripContext
from adam_mpi.model.engine.program import Program
from adam_mpi.model.graph_context import GraphContext
from adam_mpi.model.graph_layers import GraphLayers, graph_bytes
from adam_mpi.model.input_format import SCALED_BYTES, InputFormat
from adam_mpi.model.layers import (
    Activation,
    Conv,
    Dense,
    Dropout,
    Layer,
    LayerShape,
    LocalResponseNorm,
    MaxPool,
    infer,
    missing_rule,
)
from adam_mpi.model.partition import Strip
from adam_mpi.model.reference_context import Context
from adam_mpi.model.reference_strip_context import StripContext

ENGINES = ("generated", "reference")


class Network:
    """Makes contexts for blocks of up to `images` images; `seed` is that of the dropout masks.

    The generated engine computes in float32; the reference engine in any type. Dense layers in `captured` keep their
    activations and errors, for `factors` of a context. `choices` say how the generated engine computes each
    convolution: the result of `tune`, or the `choices` of another network; without them a cost model decides.
    `batches` is the number of batches in a round, after which large layers are updated without a gradient in memory.
    Images arrive in `form`.
    """

    def __init__(
        self,
        shapes: Sequence[LayerShape],
        images: int,
        seed: int,
        dtype: DTypeLike = np.float32,
        engine: str = "reference",
        captured: Sequence[str] = (),
        choices: dict | None = None,
        batches: int = 1,
        strip: Strip | None = None,
        form: InputFormat = SCALED_BYTES,
    ) -> None:
        self.strip = strip
        self.form = form
        self.captured = tuple(captured)
        self.shapes = shapes if isinstance(shapes, GraphLayers) else tuple(shapes)
        self.images = images
        self.seed = seed
        self.dtype = np.dtype(dtype)
        self.program = None
        self.generated = engine == "generated" and self.dtype == np.float32
        if isinstance(shapes, GraphLayers):
            return
        if engine == "generated" and self.dtype == np.float32:
            stack = strip.stack if strip else self.shapes
            self.program = program.build(
                stack,
                images,
                lanes=machine.lanes(),
                registers=machine.registers(),
                choices=choices,
                captured=captured,
                batches=batches,
                form=form,
            )

    @cached_property
    def statistics(self) -> bool:
        """Return whether the model has running statistics."""
        return any(tensor.statistic for tensor in parameters.tensors(self.shapes))

    @property
    def choices(self) -> dict:
        """Return how each convolution is computed, as JSON, which is kept where the same bits are wanted again."""
        return self.program.choices if self.program else {}

    @property
    def bytes(self) -> int:
        """Return the bytes of memory of one context."""
        if isinstance(self.shapes, GraphLayers):
            return graph_bytes(self.shapes, self.images)
        if self.program:
            return 4 * self.program.floats
        return working_set(self.strip.stack if self.strip else self.shapes, self.images, self.dtype)

    @property
    def uncopied(self) -> tuple[str, ...]:
        """Return the layers that all threads read in one shared place because they are too large for a copy each."""
        return self.program.uncopied if self.program else ()

    @property
    def fused_layers(self) -> tuple[str, ...]:
        """Return the layers whose gradient is fused with the update at the end of a round and never in memory."""
        return self.program.fused_layers if self.program else ()

    def spans_without(self, layers: Sequence[str]) -> list[tuple[int, int]]:
        """Return the spans of the flat parameter vector of all layers but `layers`."""
        return [span for layer, span in parameters.spans(self.shapes).items() if layer not in layers]

    def copied(self) -> list[tuple[int, int]]:
        """Return the spans of the flat parameter vector that threads have copies of."""
        return self.spans_without(self.uncopied)

    def context(self, shared: np.ndarray | None = None) -> Context | EngineContext | GraphContext:
        """Return a new context, for one thread or one block in flight; it reads `uncopied` layers in `shared`."""
        if isinstance(self.shapes, GraphLayers):
            return GraphContext(self.shapes, self.images, self.seed, self.dtype, self.generated)
        if self.program:
            text = self.program.text
            lanes = self.program.lanes
            apply_fused = jit.apply_fused(text, lanes) if shared is not None and self.fused_layers else None
            return EngineContext(
                shapes=self.shapes,
                images=self.images,
                seed=self.seed,
                program=self.program,
                run=_compiled(self.program),
                shared=shared,
                run_fused=apply_fused,
            )
        return Context(
            self.shapes,
            images=self.images,
            seed=self.seed,
            dtype=self.dtype,
            captured=self.captured,
            form=self.form,
        )

    def strip_context(self) -> StripContext | EngineStripContext:
        """Return a new context for the network's strip."""
        assert self.strip is not None
        if self.program:
            return EngineStripContext(self.strip, self.images, self.seed, self.program, _compiled(self.program))
        return StripContext(self.strip, self.images, self.seed, self.dtype, form=self.form)


def _compiled(program: Program) -> Callable:
    """Return the compiled function `run` of `program`."""
    return jit.run(program.text, program.lanes, "uint8" if program.form.bytes else "float32")


def working_set(
    shapes: Sequence[LayerShape], images: int, dtype: DTypeLike = np.float32, engine: str = "reference"
) -> int:
    """Return the bytes of one context's buffers."""
    if isinstance(shapes, GraphLayers):
        return graph_bytes(shapes, images)
    if engine == "generated":
        return Network(shapes, images, 0, dtype, engine).bytes
    return sum(buffer.bytes for buffer in reference_buffers.plan(shapes, images, dtype).values())


def warm(shapes: Sequence[LayerShape], images: int = 1, engine: str = "reference", choices: dict | None = None) -> None:
    """Compile the kernels that these layers need, or load them from the cache."""
    if isinstance(shapes, GraphLayers):
        Network(shapes, images, 0, engine=engine).context()
        return
    if engine == "generated":
        Network(shapes, images, 0, engine=engine, choices=choices).context()
        return
    # numba compiles the reference kernels per type, whatever the shape: run a tiny stack of the same layers once.
    tiny = infer([_tiny(shape.layer) for shape in shapes], (1, 1, 1), classes=2)
    context = Network(tiny, images=1, seed=0).context()
    weights = np.zeros(parameters.total(tiny), np.float32)
    context.train(
        weights,
        gradient=weights.copy(),
        pixels=np.zeros((1, 1, 1, 1), np.uint8),
        labels=np.zeros(1, np.int64),
        ids=np.zeros(1, np.int64),
        epoch=0,
    )


def _tiny(layer: Layer) -> Layer:
    """Return a layer of the same kind for an image of one pixel and two classes."""
    if isinstance(layer, Conv):
        return Conv(channels=1, kernel=1)
    if isinstance(layer, MaxPool):
        return type(layer)(size=1)
    if isinstance(layer, Dense):
        return Dense(units=2)
    if isinstance(layer, LocalResponseNorm | Activation | Dropout):
        return layer
    raise missing_rule(layer, "tiny form (_tiny in model/network.py)")
