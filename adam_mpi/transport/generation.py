"""One generation of a job: the world, memory layout, windows and control channel of one membership."""

from collections.abc import Mapping
from dataclasses import dataclass

from adam_mpi.cluster.control_messages import ControlChannel
from adam_mpi.cluster.windows import Window, choose_kind
from adam_mpi.cluster.world import World
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.push_protocol import Choice


@dataclass(frozen=True)
class Generation:
    """The ranks of one generation and the memory they share; a rank that is lost or joins ends it."""

    world: World
    memory_layout: MemoryLayout
    choices: Mapping[str, Choice]
    """Layer -> what it pushes: deltas or factors."""
    mailbox_window: Window
    """The mailboxes of servers, into which pushers write their messages."""
    weights_window: Window
    """The `PublishedWeights` of servers: others read clocks, acknowledgements and weights there."""
    replication_window: Window | None
    """Rings into which servers write records for other copies of their shards; None where each shard has one copy."""
    channel: ControlChannel

    @classmethod
    def open(cls, world: World, memory_layout: MemoryLayout, choices: Mapping[str, Choice]) -> "Generation":
        """Return a generation with new windows; collective over all ranks of `world`.

        All ranks agree before each window, because making one with a dead member crashes the others.
        """
        kind = choose_kind(world.config.cluster.transport, world.survivable)
        serves = "server" in world.place.roles
        world.agree()
        mailbox = kind.to_write(world.comm, world.node, memory_layout.mailbox_bytes if serves else 0)
        world.agree()
        weights = kind.to_read(world.comm, world.node, memory_layout.published_bytes(world.rank) if serves else 0)
        replication = None
        if memory_layout.peers.count:
            world.agree()
            replication = kind.to_write(world.comm, world.node, memory_layout.replication_bytes if serves else 0)
        return cls(
            world=world,
            memory_layout=memory_layout,
            choices=choices,
            mailbox_window=mailbox,
            weights_window=weights,
            replication_window=replication,
            channel=ControlChannel(world.control),
        )

    @property
    def windows(self) -> list[Window]:
        """Return the windows there are."""
        return [window for window in (self.mailbox_window, self.weights_window, self.replication_window) if window]
