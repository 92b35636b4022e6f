"""Messages in a mailbox: received when whole, never before."""

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numba import njit

from adam_mpi.sharding import message_formats
from adam_mpi.sharding.message_formats import HEADER_WORDS
from adam_mpi.transport import mailbox
from adam_mpi.transport.mailbox import ABSENT, FIRST_SUMMED, TORN, WHOLE

SLOT = 256  # words
GUARD = 0xDEADBEEF


def message(body, batches=(), position=1, seed=0, **fields):
    """Return a slot with a message and its checksum, and the length of the message in words."""
    slot = np.zeros(SLOT, np.uint32)
    header = np.zeros((), message_formats.HEADER)
    header["words"], header["batches"] = body, len(batches)
    for name, value in fields.items():
        header[name] = value
    mailbox.body(slot)[:body] = np.random.default_rng(seed).integers(0, 2**32, body, np.uint32)
    length = mailbox.seal(slot, header, np.array(batches, np.int64))
    mailbox.write_position(slot[:length], position)
    mailbox.write_checksum(slot[:length])
    return slot, length


def state(slot, position=1, near=False):
    return mailbox.slot_state(slot, 0, SLOT, position, near)


BODIES = st.integers(0, 90)
BATCHES = st.lists(st.integers(0, 2**40), max_size=5)


@given(BODIES, BATCHES)
def test_a_whole_message_is_received_with_all_it_carries(body, batches):
    slot, length = message(body, batches, shard=7, sequence=11, clock=3)
    assert state(slot) == WHOLE
    assert length == message_formats.message_words(body, len(batches)) and length % 2 == 0
    header = slot[:HEADER_WORDS].view(message_formats.HEADER)[0]
    assert (header["shard"], header["sequence"], header["clock"], header["words"]) == (7, 11, 3, body)
    assert slot[length - 2 * len(batches) : length].view(np.int64).tolist() == batches


@pytest.mark.parametrize("position", [0, 2, 9, -1])
def test_a_message_of_another_position_is_absent(position):
    slot, _ = message(20)
    assert state(slot, position) == ABSENT
    assert state(np.zeros(SLOT, np.uint32)) == ABSENT


@settings(max_examples=200)
@given(BODIES, BATCHES, st.data())
def test_a_word_that_differs_is_noticed(body, batches, data):
    slot, length = message(body, batches)
    word = data.draw(st.integers(0, length - 1))
    slot[word] ^= np.uint32(data.draw(st.integers(1, 2**32 - 1)))
    assert state(slot) in (ABSENT, TORN)


@settings(max_examples=200)
@given(st.integers(2, 90), st.data())
def test_blocks_that_change_places_are_noticed(body, data):
    slot, length = message(body)
    words = st.integers(FIRST_SUMMED, length - 1)
    a, b = sorted([data.draw(words), data.draw(words)])
    size = data.draw(st.integers(1, 16))
    assume(a + size <= b and b + size <= length)
    assume(not np.array_equal(slot[a : a + size], slot[b : b + size]))
    slot[a : a + size], slot[b : b + size] = slot[b : b + size].copy(), slot[a : a + size].copy()
    assert state(slot) in (ABSENT, TORN)


@settings(max_examples=200)
@given(st.integers(1, 90), BATCHES, st.data())
def test_a_message_that_has_arrived_in_part_is_not_received(body, batches, data):
    """The rest of the slot is zeros, or the last message of the slot."""
    slot, length = message(body, batches, position=5, seed=1, sequence=5)
    for under in (np.zeros(SLOT, np.uint32), message(body, batches, position=1, seed=2, sequence=1)[0]):
        first, last = sorted([data.draw(st.integers(0, length)), data.draw(st.integers(0, length))])
        part = under.copy()
        part[first:last] = slot[first:last]
        if not np.array_equal(part[:length], slot[:length]):
            assert state(part, 5) in (ABSENT, TORN)


@settings(max_examples=200)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(-(2**63), 2**63 - 1), st.booleans())
def test_wrong_sizes_in_a_header_are_read_nowhere_else(words, batches, near):
    """The slot is the last of its memory: words beyond it must not be summed."""
    slot, _ = message(10)
    header = slot[:HEADER_WORDS].view(message_formats.HEADER)
    header["words"], header["batches"] = words, batches
    fits = 0 <= words <= SLOT and 0 <= batches <= SLOT and message_formats.message_words(words, batches) <= SLOT
    found = state(slot, near=near)
    assert found == (WHOLE if near and fits else TORN) or (words, batches, found) == (10, 0, WHOLE)


def test_a_message_written_in_place_is_whole_when_its_position_is_there():
    slot, _ = message(10)
    slot[2:4] = 0
    assert state(slot) == TORN and state(slot, near=True) == WHOLE
    assert state(slot, position=2, near=True) == ABSENT


@given(st.lists(st.integers(0, 40), min_size=1, max_size=6), st.integers(2, 6), st.data())
def test_arrived_messages_of_all_rings_are_found_in_one_call(collected, slots, data):
    """They are the next whole messages of each ring, up to one that is torn, missing, or has no room yet."""
    words = np.zeros((len(collected), slots, SLOT), np.uint32)
    applied, near = np.zeros((len(collected), 2), np.int64)[:, 0], np.zeros(len(collected), bool)
    whole, torn = [], []
    for ring, count in enumerate(collected):
        waiting = data.draw(st.integers(0, min(count, slots)))
        applied[ring] = count - waiting
        kinds = data.draw(st.lists(st.sampled_from(["whole", "torn", "old"]), max_size=slots - waiting))
        for position, kind in enumerate(kinds, count + 1):
            slot, _ = message(20, position=position - slots if kind == "old" else position)
            slot[40] ^= kind == "torn"
            words[ring, (position - 1) % slots] = slot
        good = next((place for place, kind in enumerate(kinds) if kind != "whole"), len(kinds))
        whole += [ring * slots + (count + place) % slots for place in range(good)]
        torn += [ring] if kinds[good : good + 1] == ["torn"] else []
    now = np.array(collected)
    found = mailbox.arrived(words.reshape(-1), slots, SLOT, now, applied, near)
    assert (found[0].tolist(), found[1].tolist()) == (whole, torn)
    assert now.sum() == sum(collected) + len(whole)


def test_sealing_leaves_the_rest_of_the_slot_alone():
    slot = np.full(SLOT, GUARD, np.uint32)
    header = np.zeros((), message_formats.HEADER)
    header["words"], header["batches"] = 5, 1
    length = mailbox.seal(slot, header, np.array([77]))
    assert length == HEADER_WORDS + 6 + 2
    assert np.all(slot[length:] == GUARD) and slot[HEADER_WORDS + 5] == 0


@pytest.mark.parametrize("size", [1, 2, 31, 32, 33, 1000])
def test_a_copy_reports_a_nan_or_an_infinity(size):
    for place in {0, size // 2, size - 1}:
        for value, finite in ((np.nan, False), (np.inf, False), (-np.inf, False), (3e38, True), (1e-45, True)):
            values = np.ones(size, np.float32)
            values[place] = value
            body = np.zeros(size, np.uint32)
            assert mailbox.copy_words(body, values.view(np.uint32)) == finite
            assert np.array_equal(body, values.view(np.uint32))


def test_the_rest_of_a_message_is_read_behind_a_barrier():
    """On CPUs that reorder reads, a header could otherwise be older than its position."""
    # Compiled again: what comes from the cache cannot be looked at.
    compiled = njit(mailbox.slot_state.py_func)
    compiled(np.zeros(SLOT, np.uint32), 0, SLOT, 1, True)
    (code,) = compiled.inspect_llvm().values()
    own = code[code.index("define ") :].partition("\n}\n")[0]
    assert "mailbox10slot_state" in own.partition("\n")[0]
    (block,) = (block for block in own.split("\n\n") if "fence acquire" in block)
    before, after = block.split("fence acquire")
    assert " load " not in before and after.count(" load ") == 2, "the lengths are read right behind it"
