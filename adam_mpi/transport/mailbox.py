"""Messages in a mailbox: how a message is packed, and how its receiver sees that it has arrived whole.

A put completes locally only and may be seen half written, so a message counts as arrived when its header carries
the expected ring position and its checksum agrees. Words are weighted by their place: a plain sum would pass a torn
message. Inside a node a pusher writes into the mailbox itself, the position last and after a memory barrier
(`Win.Sync`); such a message is whole when its position is there, and carries no checksum. A receiver that has seen the
position reads the rest behind a barrier of its own: x86 keeps the order of reads by itself, other CPUs do not.

    message = header (128 bytes) | body, padded to 8 bytes | batch numbers (int64)
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from adam_mpi.base.native import acquire
from adam_mpi.cluster.world import World
from adam_mpi.sharding.message_formats import HEADER, HEADER_WORDS, MOST_PARTS, message_words
from adam_mpi.sharding.rings import Rings
from adam_mpi.transport.published_weights import PublishedWeights

EXPONENT = np.uint32(0x7F800000)  # all ones in a NaN and in an infinity
FIRST_SUMMED = 4  # words 0-3 are the position and the checksum itself
MIX = np.uint64(0x9E3779B97F4A7C15)  # odd, and large: positions that are near each other give sums that are not


def body(message: np.ndarray) -> np.ndarray:
    """Return the part of a slot that the body of its message goes into."""
    return message[HEADER_WORDS:]


def seal(message: np.ndarray, header: np.ndarray, batches: np.ndarray) -> int:
    """Put header and batch ids around a body of `header["words"]` words; return the message's length in words.

    `write_position` writes the position.
    """
    last = HEADER_WORDS + int(header["words"])
    end = message_words(last - HEADER_WORDS, batches.size)
    message[last : end - 2 * batches.size] = 0
    message[end - 2 * batches.size : end] = batches.view(np.uint32)
    np.ndarray((), HEADER, message)[()] = header
    return end


def write_position(message: np.ndarray, position: int) -> None:
    """Write the position, which makes a message whole for a receiver on the same node."""
    message[:2].view(np.int64)[0] = position


def write_checksum(message: np.ndarray) -> None:
    """Write the checksum of a message that travels."""
    message[2:4].view(np.uint64)[0] = message_checksum(message)


@njit(nogil=True, cache=True)
def copy_words(body: np.ndarray, values: np.ndarray) -> bool:
    """Copy words into the body of a message; return whether none of them is a NaN or an infinity."""
    peak = np.uint32(0)
    for i in range(values.size):
        word = values[i]
        body[i] = word
        peak = max(peak, word & np.uint32(0x7FFFFFFF))
    return bool(peak < EXPONENT)


@njit(nogil=True, cache=True)
def finite(values: np.ndarray) -> bool:
    """Return whether none of these words is a NaN or an infinity."""
    peak = np.uint32(0)
    for i in range(values.size):
        peak = max(peak, values[i] & np.uint32(0x7FFFFFFF))
    return bool(peak < EXPONENT)


@njit(nogil=True, cache=True)
def message_checksum(message: np.ndarray) -> np.uint64:
    """Return the checksum of a message in a mailbox: the weighted sum of the words behind it, plus the position.

    With the position in it, neither new memory nor the slot's last message passes when only the position has arrived.
    """
    total = np.uint64(message[0]) * MIX + np.uint64(message[1])
    summed = message[FIRST_SUMMED:]
    # Unsigned counters: a loop whose signed counter may overflow is not vectorized.
    weight = np.uint32(2 * FIRST_SUMMED + 1)
    for i in range(summed.size):
        total += np.uint64(summed[i]) * np.uint64(weight + np.uint32(2) * np.uint32(i))
    return total


# What a slot holds: not the message that is expected next, a part of it, or all of it.
ABSENT, TORN, WHOLE = range(3)


@njit(nogil=True, cache=True)
def slot_state(ring: np.ndarray, start: int, slot_words: int, position: int, near: bool) -> int:
    """Return what the slot that starts at word `start` holds for `position`; `near`: its pusher writes here itself."""
    header = ring[start : start + HEADER_WORDS].view(np.int64)
    if header[0] != position:
        return ABSENT
    # Between the position and the rest: the caller reads the rest of the header and the body after this.
    acquire()
    words = header[6]
    batches = header[7]
    if words < 0 or batches < 0 or words > slot_words or batches > slot_words:
        return TORN
    length = HEADER_WORDS + words + words % 2 + 2 * batches
    if length > slot_words:
        return TORN
    if near or np.uint64(header[1]) == message_checksum(ring[start : start + length]):
        return WHOLE
    return TORN


@njit(nogil=True, cache=True)
def arrived(
    words: np.ndarray, slots: int, slot_words: int, collected: np.ndarray, applied: np.ndarray, near: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the slots of whole messages in all rings, each ring's in order, and the rings whose next one is torn.

    `collected`, the position of the last message found in each ring, advances. Beyond the position in `applied` a ring
    has room for one message per slot.
    """
    whole = np.empty(near.size * slots, np.int64)
    torn = np.empty(near.size, np.int64)
    found = 0
    broken = 0
    for ring in range(near.size):
        held = ABSENT
        while collected[ring] < applied[ring] + slots:
            slot = ring * slots + collected[ring] % slots
            held = slot_state(words, slot * slot_words, slot_words, collected[ring] + 1, near[ring])
            if held != WHOLE:
                break
            whole[found] = slot
            found += 1
            collected[ring] += 1
        if held == TORN:
            torn[broken] = ring
            broken += 1
    return whole[:found], torn[:broken]


@dataclass(slots=True, eq=False)
class ReceivedMessage:
    """A message that has arrived: its place, and the fields of its header."""

    ring: int
    start: int
    """Offset of its body in the mailbox, in 32-bit words."""
    position: int
    checksum: int
    generation: int
    pusher: int
    sequence: int
    clock: int
    words: int
    batches: int
    first: int
    values: int
    images: int
    seen: int
    shard: int
    kind: int
    codec: int
    last: int
    finite: int
    part: int
    parts: int
    targets: Sequence[int] = ()
    """Shards that it is for and that do not have it yet."""
    known: Sequence[int] = ()
    """Shards that have it already, because it was sent again."""
    pending: int = 1
    """How many of these shards are not complete: stepped, on all copies."""
    unstepped: int = 0
    """How many of its targets have not stepped on it here."""
    factors: np.ndarray | None = None
    """The body of a factor push as float32."""
    buffer: np.ndarray | None = None
    """The buffer that the factors were unpacked into, if they had to be."""
    ids: np.ndarray | None = None
    """The ids of its batches, once they are copied out of its slot."""
    summed: int = 0
    """How many of its shards have a sum that it is in, where sums wait for others."""
    freed: bool = False
    """Whether its slot was freed before it was complete."""

    @property
    def number(self) -> int:
        """Return a number that grows with every message of a pusher to a shard."""
        return self.sequence * MOST_PARTS + self.part


class RingReceiver:
    """Reads the messages that others write into the rings of this server."""

    def __init__(
        self, world: World, rings: Rings, senders: Sequence[int], memory: np.ndarray, published: PublishedWeights
    ) -> None:
        """Receive from the rings of `memory`; `senders` has the rank that writes each ring."""
        self.slots = rings.slots
        self.slot_words = rings.slot_bytes // 4
        self.words = memory.view(np.uint32)
        self.headers = np.ndarray(len(senders) * self.slots, HEADER, memory, strides=(rings.slot_bytes,))
        shared = world.config.cluster.transport == "shared"
        hosts = [world.layout.places[rank].host for rank in senders]
        self.near = np.array([shared and host == world.place.host for host in hosts], bool)
        """Rings whose sender writes where we read; their messages carry no checksum."""
        lines = slice(rings.first_line, rings.first_line + len(senders))
        self.applied = published.applied[lines]
        self.torn = published.torn[lines]
        self.asked = published.asked[lines]
        self.arrived = published.arrived[lines]
        self.collected = np.zeros(len(senders), np.int64)
        self.torn_seconds = world.config.server.torn_seconds
        self.torn_since: dict[tuple[int, int], float] = {}
        """(ring, position) of a message that has arrived in part -> since when."""

    def collect_messages(self) -> list[ReceivedMessage]:
        """Return the messages that have arrived whole since the last call."""
        place = self.words, self.slots, self.slot_words, self.collected, self.applied, self.near
        whole, torn = arrived(*place)
        if torn.size or self.torn_since:
            broken = [(ring, int(self.collected[ring]) + 1) for ring in torn.tolist()]
            self.torn_since = {message: self.torn_since.get(message, time.monotonic()) for message in broken}
        if not whole.size:
            return []
        self.arrived[:] = self.collected
        headers = zip(whole.tolist(), self.headers[whole].tolist(), strict=True)
        return [
            ReceivedMessage(slot // self.slots, slot * self.slot_words + HEADER_WORDS, *fields)
            for slot, fields in headers
        ]

    def ask_again(self) -> list[tuple[int, int]]:
        """Ask for messages that have been torn for too long; return (ring, position) of each."""
        if not self.torn_since:
            return []
        now = time.monotonic()
        late = [message for message, since in self.torn_since.items() if now - since > self.torn_seconds]
        for ring, position in late:
            self.torn_since[ring, position] = now
            self.torn[ring] = position
            self.asked[ring] += 1
        return late
