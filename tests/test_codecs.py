"""Codecs: what is decoded, how many words it takes, and that error feedback loses nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adam_mpi.sharding.codecs import BY_NUMBER, CODECS, NUMBERS, bfloat16

SIZES = [1, 2, 3, 31, 32, 33, 63, 64, 65, 1023, 1024, 1025, 4096, 5000]
PRECISION = {"none": 0.0, "float16": 2.0**-11, "bfloat16": 2.0**-8}
FEEDBACK = ["onebit", "topk"]
EDGES = np.array([0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 6e-8, 1, -1, 65504, 1e30, -3e38], np.float32)


def draw(size, seed=0):
    return np.random.default_rng(seed).standard_normal(size).astype(np.float32)


def sent(codec, values, residual):
    """Encode into memory with a guard behind it; return the values, decoded into memory full of NaN."""
    room = codec.words(values.size)
    out = np.full(room + 8, 0xDEADBEEF, np.uint32)
    used = codec.encode(values, residual, out[:room])
    assert used <= room and np.all(out[room:] == 0xDEADBEEF)
    back = np.full(values.size, np.nan, np.float32)
    codec.decode(out[:used], back)
    return back


def test_numbers_in_messages_identify_the_codecs():
    assert [BY_NUMBER[NUMBERS[name]] for name in CODECS] == list(CODECS.values())


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", PRECISION)
def test_values_are_decoded_within_their_precision(name, size):
    values = draw(size)
    back = sent(CODECS[name], values, np.zeros(0, np.float32))
    assert np.all(np.abs(back - values) <= PRECISION[name] * np.abs(values))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CODECS)
def test_words_are_enough_and_zeros_are_decoded_as_zeros(name, size):
    codec = CODECS[name]
    back = sent(codec, np.zeros(size, np.float32), np.zeros(size if codec.feedback else 0, np.float32))
    assert np.array_equal(back, np.zeros(size))


@pytest.mark.parametrize("name", CODECS)
def test_very_small_and_very_large_values_stay_finite(name):
    codec = CODECS[name]
    residual = np.zeros(EDGES.size if codec.feedback else 0, np.float32)
    back = sent(codec, EDGES, residual)
    assert np.isfinite(back).all() and np.isfinite(residual).all()
    if name == "none":
        assert np.array_equal(back.view(np.uint32), EDGES.view(np.uint32))


def test_float16_keeps_the_largest_half_instead_of_an_infinity():
    values = np.array([1e30, -1e30, 70000, 5], np.float32)
    assert sent(CODECS["float16"], values, values[:0]).tolist() == [65504, -65504, 65504, 5]


VALUES = st.lists(st.floats(-1e3, 1e3, width=32) | st.sampled_from([0.0, 1e-40, -1e-40]), min_size=1, max_size=90)


@pytest.mark.parametrize("name", FEEDBACK)
@settings(max_examples=60)
@given(st.data())
def test_what_was_sent_and_the_residual_are_the_true_sum(name, data):
    codec, values = CODECS[name], np.array(data.draw(VALUES), np.float32)
    pushes = [values * np.float32(scale) for scale in data.draw(st.lists(st.floats(-2, 2, width=32), max_size=8))]
    residual, total, true = np.zeros_like(values), np.zeros(values.size), np.zeros(values.size)
    for push in pushes:
        total += sent(codec, push, residual)
        true += push
    # Each push rounds sums of the size of the largest value, a few times.
    size = max((np.abs(push).max() for push in pushes), default=0)
    assert np.allclose(total + residual, true, rtol=0, atol=1e-6 * size * (len(pushes) + 1) ** 2)


@pytest.mark.parametrize("name", FEEDBACK)
@pytest.mark.parametrize("size", SIZES)
def test_feedback_follows_the_true_sum_over_many_pushes(name, size):
    codec, residual = CODECS[name], np.zeros(size, np.float32)
    total, true = np.zeros(size), np.zeros(size)
    for step in range(30):
        push = draw(size, step)
        total += sent(codec, push, residual)
        true += push
        assert np.allclose(total + residual, true, atol=1e-4)


@pytest.mark.parametrize("size", [4096, 4097, 5000, 100_000, 262_144])
def test_one_bit_takes_25_times_fewer_words(size):
    assert 25 * CODECS["onebit"].words(size) <= size


def test_one_bit_sends_the_mean_of_each_sign():
    values = np.array([1, 3, -2, -4, 0], np.float32)
    back = sent(CODECS["onebit"], values, np.zeros(5, np.float32))
    assert back.tolist() == [2, 2, -2, -2, -2]


def test_topk_sends_the_largest_values_as_they_are():
    values, residual = draw(1000), np.zeros(1000, np.float32)
    back = sent(CODECS["topk"], values, residual)
    chosen = np.flatnonzero(back)
    assert chosen.size == 16 and np.array_equal(back[chosen], values[chosen])
    assert np.abs(values[chosen]).min() >= np.abs(residual).max()
    assert np.array_equal(back + residual, values)


def nearest_even(value):
    """Return the bfloat16 nearest to `value` by definition; half-way between two, the even one."""
    word = int(np.float32(value).view(np.uint32))
    low, rest = word >> 16, word & 0xFFFF
    return low + (rest > 0x8000 or (rest == 0x8000 and low % 2 == 1))


@settings(max_examples=300)
@given(st.floats(width=32, allow_nan=False) | st.sampled_from([1.00390625, 1.01171875, 3.3961775e38, -0.0, 1e-45]))
def test_bfloat16_rounds_to_nearest_even(value):
    halves = np.zeros(1, np.uint16)
    bfloat16.shorten(np.array([value], np.float32).view(np.uint32), halves)
    assert halves[0] == nearest_even(value)


def test_bfloat16_keeps_a_nan_a_nan():
    words, halves, back = np.array([0x7FFFFFFF, 0xFFC00000], np.uint32), np.zeros(2, np.uint16), np.zeros(2, np.uint32)
    bfloat16.shorten(words, halves)
    bfloat16.lengthen(halves, back)
    assert np.isnan(back.view(np.float32)).all()
