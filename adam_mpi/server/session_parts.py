"""The parts of a server's session, made from its generation and from the shard copies that it begins with."""

from collections.abc import Sequence
from itertools import product
from typing import TYPE_CHECKING

import numpy as np

from adam_mpi.base.pools import EMPTY
from adam_mpi.optimizer.clipping import clips_steps
from adam_mpi.server.clipped_clocks import ClippedClocks
from adam_mpi.server.push_queue import PushQueue
from adam_mpi.server.replication import Replicator
from adam_mpi.server.stepper import Stepper

if TYPE_CHECKING:
    from adam_mpi.server.session import ServerSession


def push_queue(session: "ServerSession") -> PushQueue:
    """Return the push queue of a generation, which knows the messages that are in the shards already."""
    memory = session.mailbox_window.memory
    queue = PushQueue(session.world, session.memory_layout, memory, session.published)
    for index, (ring, pusher) in product(session.place, enumerate(queue.members)):
        queue.highest_numbers[index, ring] = session.shard_copies[index].table.get(pusher, 0)
    return queue


def stepper(session: "ServerSession") -> Stepper:
    """Return the stepper of a generation, with what is published beside the weights up to date."""
    arena = EMPTY
    replication = session.generation.replication_window
    if replication is not None:
        layout = session.memory_layout
        arena = replication.memory[layout.peers.bytes : layout.replication_bytes].view(np.float32)
    made = Stepper(
        config=session.world.config,
        shards=session.shards,
        published=session.published,
        memory=session.mailbox_window.memory,
        factors=session.push_queue.factors,
        shard_copies=session.shard_copies,
        arena=arena,
        groups=session.memory_layout.groups,
    )
    made.remembers = session.progress.synchronous and session.world.survivable
    for shard in session.shards:
        made.derive(shard.index)
    return made


def replicator(session: "ServerSession", lacking: Sequence[tuple[int, int]]) -> Replicator | None:
    """Return what keeps other copies up to date; None where each shard has one copy."""
    replication = session.generation.replication_window
    if replication is None or not session.memory_layout.peers.count:
        return None
    return Replicator(
        session.generation,
        replication,
        session.published,
        session.stepper,
        session.thread_pool,
        lacking=[(server, shard) for server, shard in lacking if shard in session.place],
        on_step=session.progress.note_copy_step,
    )


def clipped_clocks(session: "ServerSession") -> ClippedClocks | None:
    """Return what holds gradients until the norm of a whole step is known; None where steps are not clipped."""
    if not clips_steps(session.world.config) or not session.shards:
        return None
    channel = session.generation.channel
    return ClippedClocks(session.world.config, session.memory_layout, session.world.rank, channel.send)
