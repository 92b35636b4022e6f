"""Bytes of memory that a rank needs in each of its roles. Pure."""

from collections.abc import Sequence

from adam_mpi.cluster.layout import Layout
from adam_mpi.config import Config
from adam_mpi.data.batch_loader import AHEAD, GROUP
from adam_mpi.data.sets import Description
from adam_mpi.model import parameters
from adam_mpi.model.network import Network
from adam_mpi.optimizer.clipping import clips_steps
from adam_mpi.sharding.codecs import CODECS
from adam_mpi.sharding.fields import INPUT, message_bytes
from adam_mpi.sharding.memory_layout import WIDTHS, MemoryLayout
from adam_mpi.sharding.push_protocol import largest_push, matrices
from adam_mpi.worker.batch_filter import keeps_velocity
from adam_mpi.worker.gradient_buffer import gradient_buffers, takes_back


def data(config: Config, layout: Layout, description: Description) -> int:
    """Return the bytes of memory of a data rank: the cache, a label and an index per image, and the batches ahead."""
    images = description.train + description.validation + description.test
    pixels = sum(field.size for field in description.fields if field.role == INPUT)
    ahead = max(AHEAD * len(layout.workers) * config.train.batch, 2 * GROUP) * pixels
    return min(config.data.cache, images * pixels) + 16 * images + ahead


def worker(
    config: Config, description: Description, net: Network, memory_layout: MemoryLayout, captured: Sequence[str]
) -> int:
    """Return the bytes of memory of a worker.

    It holds local weights, the weights of a pull, gradient buffers with their factors, and a gradient and a context per
    thread; without strips also a copy of the pulled weights, and two copies of the weights for each of several threads.
    Where threads keep velocities, each has one, and each of several threads the sum of a round apart from its gradient.
    With error feedback it holds the residual and, where pushes may be taken back, its value before each of them.
    """
    threads = config.worker.threads or 1
    size = 4 * parameters.total(net.shapes)
    contexts = config.worker.in_flight if net.strip else threads
    dense = [matrix for layer, matrix in matrices(memory_layout.tensors).items() if layer in captured]
    factors = 4 * largest_push(config) * sum(matrix.inputs + matrix.outputs for matrix in dense)
    total = (2 + contexts if net.strip else 3 + contexts * (3 if threads > 1 else 1)) * size
    count = gradient_buffers(threads, bool(memory_layout.peers.count), config.consistency.staleness)
    total += count * (size + factors)
    if keeps_velocity(config) and not net.strip:
        total += threads * size * (2 if threads > 1 else 1)
    if CODECS[config.push.codec].feedback:
        total += size * (1 + count * takes_back(config, memory_layout.strips))
    total += contexts * net.bytes + len(memory_layout.servers) * memory_layout.ring_bytes
    return total + config.data.prefetch * message_bytes(config.train.batch, description.fields)


def served(config: Config, memory_layout: MemoryLayout, server: int, survivable: bool = True) -> int:
    """Return the bytes of memory for weights, optimizer state and average that the rank `server` serves or copies.

    In synchronous training there are two of each if the loss of a rank is `survivable`: the last step may be undone.
    Where steps are clipped, there is a gradient of what it serves.
    """
    copied = sum(shard.size for shard in memory_layout.copied[server])
    remembered = 2 if config.consistency.staleness == 0 and survivable else 1
    held = WIDTHS["weights"] * memory_layout.size(server) if clips_steps(config) else 0
    short = WIDTHS["short"] * ("short" in memory_layout.regions) * memory_layout.size(server)
    return remembered * _bytes_per_parameter(memory_layout) * (memory_layout.size(server) + copied) + short + held


def server(config: Config, memory_layout: MemoryLayout, survivable: bool = True) -> int:
    """Return the bytes of memory of the largest server: what it serves, the same for a snapshot, and its mailboxes."""
    each = _bytes_per_parameter(memory_layout)
    largest = max(
        served(config, memory_layout, server, survivable) + each * memory_layout.size(server)
        for server in memory_layout.servers
    )
    return largest + memory_layout.mailbox_bytes + memory_layout.replication_bytes


def _bytes_per_parameter(memory_layout: MemoryLayout) -> int:
    """Return the bytes of memory of a parameter in a copy: weight, optimizer state, and average if there is one."""
    return (1 + len(memory_layout.states)) * WIDTHS["weights"] + WIDTHS["ema"] * ("ema" in memory_layout.regions)
