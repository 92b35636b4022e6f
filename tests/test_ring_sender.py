"""The sender of a ring, without a job."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np

from adam_mpi.sharding.rings import Rings
from adam_mpi.transport.ring_sender import RingSender


class Near:
    """A window whose target is on this host."""

    def memory_of(self, target, offset, size):
        return np.zeros(size, np.uint8)


def test_a_sender_of_a_generation_that_is_over_is_freed_without_a_garbage_collection():
    """Its memory is shared with the server: as long as the sender exists, the memory of the server does."""
    sender = RingSender(Rings(1, 2, 256, 0), 0, 0, Near(), Near())
    for messages in (sender.waiting, sender.held, sender.sent):
        messages.append(SimpleNamespace(copy=sender.copy))
    left = weakref.ref(sender)
    gc.disable()
    try:
        sender.drop()
        del sender
        assert left() is None
    finally:
        gc.enable()
