"""The rings of one worker in the mailboxes of a generation's servers."""

from dataclasses import replace

from adam_mpi.cluster.world import World
from adam_mpi.sharding.memory_layout import MemoryLayout
from adam_mpi.sharding.worker_shards import WorkerShards
from adam_mpi.transport.generation import Generation
from adam_mpi.transport.ring_sender import RingSender
from adam_mpi.worker.push_messages import PushMessage


class PushRings:
    """Hold a sender for each server that this worker pushes to in `generation`."""

    def __init__(self, generation: Generation, worker_shards: WorkerShards) -> None:
        """Lay `worker_shards`, which may be those of an earlier generation, out for `generation`."""
        self.generation = generation
        self.worker_shards = replace(worker_shards, memory_layout=generation.memory_layout)
        self.ring = self.memory_layout.pushers.index(self.world.rank)
        """The number of this worker's ring in each mailbox."""
        self.senders: list[RingSender[PushMessage]] = [
            RingSender(
                self.memory_layout.rings, server, self.ring, generation.mailbox_window, generation.weights_window
            )
            for server in self.memory_layout.servers
            if self.worker_shards.pushed[server]
        ]

    @property
    def world(self) -> World:
        """Return the ranks of the generation."""
        return self.generation.world

    @property
    def memory_layout(self) -> MemoryLayout:
        """Return the memory layout of the generation."""
        return self.generation.memory_layout

    @property
    def pushers(self) -> int:
        """Return the number of workers that push."""
        return len(self.memory_layout.pushers)

    @property
    def bytes(self) -> int:
        """Return the bytes sent in this generation."""
        return sum(sender.bytes for sender in self.senders)

    @property
    def far(self) -> list[RingSender[PushMessage]]:
        """Return the senders to servers on other nodes."""
        return [sender for sender in self.senders if not sender.near]

    def step(self) -> bool:
        """Send and acknowledge what is possible now; return whether that was anything."""
        self.generation.mailbox_window.sync()
        self.generation.weights_window.sync()
        return any([sender.step() for sender in self.senders])

    def clear_sent(self) -> None:
        """Acknowledge nothing more of what is under way."""
        for sender in self.senders:
            sender.sent.clear()

    def drop(self) -> None:
        """Release all messages, and with them the memory of the generation."""
        for sender in self.senders:
            sender.drop()
