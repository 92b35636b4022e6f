"""What begins and ends with one membership of the job: its world, memory layout, windows and control channel."""

from collections.abc import Mapping
from dataclasses import dataclass

from adam_mpi.cluster.control_channel import ControlChannel
from adam_mpi.cluster.windows import Window, choose_kind
from adam_mpi.cluster.world import World
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.push_protocol import Choice


@dataclass(frozen=True)
class Generation:
    """The ranks of one generation and the memory they share; a lost or joining rank ends it and begins the next."""

    world: World
    memory_layout: MemoryLayout
    choices: Mapping[str, Choice]
    """What each layer pushes."""
    mailbox_window: Window
    """Pushers write their messages into the mailboxes of servers here."""
    weights_window: Window
    """Workers read clocks, acknowledgements and weights of servers here."""
    replication_window: Window | None
    """Servers write records for other copies of their shards here; None where each shard has one copy."""
    channel: ControlChannel

    @classmethod
    def open(cls, world: World, memory_layout: MemoryLayout, choices: Mapping[str, Choice]) -> "Generation":
        """Make the windows of a generation; collective over all ranks of `world`.

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
            replication = kind.to_write(world.comm, world.node, memory_layout.mirror_bytes if serves else 0)
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
