"""A ring in a server's mailbox, seen from the pusher, without a job around it."""

import gc
import weakref
from types import SimpleNamespace

import numpy as np

from adam_mpi.sharding.memory_layout import Rings
from adam_mpi.transport.ring_sender import RingSender


class Near:
    """A window whose target is on this host."""

    def direct(self, target, offset, size):
        return np.zeros(size, np.uint8)


def test_a_lane_of_a_generation_that_is_over_goes_without_a_search_for_rings():
    """Its memory is shared with the server: as long as it is there, the server's is."""
    lane = RingSender(Rings(1, 2, 256, 0), 0, 0, Near(), Near())
    for letters in (lane.waiting, lane.held, lane.sent):
        letters.append(SimpleNamespace(copy=lane.copy))
    left = weakref.ref(lane)
    gc.disable()
    try:
        lane.drop()
        del lane
        assert left() is None
    finally:
        gc.enable()
