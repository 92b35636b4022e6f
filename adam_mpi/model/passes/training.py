"""Chain the passes that make of a model's graph what an executor computes."""

from adam_mpi.model.graph import Graph
from adam_mpi.model.passes.fusion import fuse_elementwise
from adam_mpi.model.passes.gradient import differentiate
from adam_mpi.model.passes.pooling import fuse_pooling
from adam_mpi.model.passes.simplify import simplify


def training_graph(graph: Graph) -> Graph:
    """Return `graph` with its way back, if it has a loss: merged, fused, and without dead nodes."""
    fused = fuse_pooling(fuse_elementwise(simplify(graph)))
    if not fused.losses:
        return fused
    return fuse_elementwise(simplify(differentiate(fused)))
