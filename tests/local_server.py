"""A server and a pusher in one process: the real windows, mailbox and clients, on a world of one rank."""

import numpy as np
from mpi4py import MPI

from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.cluster.world import World
from adam_mpi.config import Config
from adam_mpi.model.parameters import Tensor
from adam_mpi.server.server import Server
from adam_mpi.sharding import memory_layout
from adam_mpi.sharding.push_protocol import choose_protocols
from adam_mpi.sharding.training_state import Position
from adam_mpi.transport.generation import Generation
from adam_mpi.worker.gradient_buffer import BatchResult, GradientBuffer
from adam_mpi.worker.pull_client import PullClient
from adam_mpi.worker.push_client import PushClient


def additive(shard=128, transport="rma", codec="none", threads=1):
    """Return a configuration of a server that adds pushes to the weights."""
    config = Config()
    config.optimizer.where = "worker"
    config.push.codec = codec
    config.server.shard = shard
    config.cluster.transport = transport
    config.server.torn_seconds = 0.1
    config.server.threads = threads
    return config


class LocalServer:
    """A server with `size` parameters that begin as zeros, and a pusher and puller of them."""

    def __init__(self, config, size, tensors=None):
        self.world = world = World(MPI.COMM_SELF, config, lambda hosts, _: _alone(hosts[0]))
        tensors = tensors or [Tensor("dense1/weight", "dense1", (size,), 0, size)]
        self.memory_layout = memory_layout.plan_layout(tensors, {0: world.hosts[0]}, (0,), config)
        self.generation = Generation.open(world, self.memory_layout, choose_protocols(self.memory_layout, config, 1, 1))
        self.server = Server(self.generation, 1000, Position(8))
        self.server.start({"weights": np.zeros(size, np.float32)})
        self.pushes = PushClient(self.generation)
        self.pulls = PullClient(self.generation)
        self.ring_sender = self.pushes.rings.senders[0]
        self.size = size

    @property
    def weights(self):
        return np.concatenate(
            [self.server.session.published.weights[shard.index] for shard in self.memory_layout.shards]
        )

    @property
    def counts(self):
        return self.server.counts + self.server.session.push_queue.counts

    def gradient_buffer(self, values, images=1):
        """Return a gradient of `images` images, `values` everywhere or of each parameter."""
        done = [BatchResult(0, 0, images, np.array([0.0, 0]))]
        return GradientBuffer(0, np.broadcast_to(np.float32(values), self.size).copy(), done)

    def push(self, values, images=1):
        """Push a gradient and wait until it is acknowledged."""
        self.pushes.push(self.gradient_buffer(values, images))
        self.apply_pushes()

    def apply_pushes(self):
        """Wait until all pushes are acknowledged."""
        self.world.wait(self._all_acknowledged, "pushes to be applied", 20)

    def pull(self):
        """Return the weights that a pull brings."""
        self.pulls.start()
        self.world.wait(lambda: bool(self.server.step() or True) and self.pulls.step(), "a pull", 20)
        return self.pulls.latest

    def free(self):
        """Free the windows."""
        for window in self.generation.windows:
            window.free()

    def _all_acknowledged(self):
        self.server.step()
        self.pushes.step()
        return not (self.ring_sender.waiting or self.ring_sender.held or self.ring_sender.sent)


def _alone(host):
    return Layout((Place(0, host, ("data", "worker", "server"), 0, 0),), 1)
