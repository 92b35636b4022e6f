"""A parameter server: pushes through its mailbox, its apply kernels against `a += b` and against a plain loop of Adam,
pulls, and its idle CPU."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _jobs import under_mpi
from _timing import interleaved
from numba import njit

from adam_mpi.optimizer import kernels, rules
from adam_mpi.optimizer.settings import BatchCounts, Settings
from adam_mpi.sharding.memory_layout import MOST_BATCHES
from adam_mpi.sharding.message_formats import message_words

# 96 MB, far more than a last-level cache holds: at 32 MB a part of `a += b` and of one message came from there.
SIZE, MESSAGES, SECONDS = 96 * 262_144, 8, 6.0
FOLDED = 4
"""Pushes that one step of Adam takes in turn."""
PROGRAM = Path(__file__).with_name("_server_mail.py")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    mail = mailbox()
    yield line("mailbox_apply_vs_add", mail["apply"] / mail["add"], 0.6)
    # Where the two cores share no cache every message goes through memory, which bounds the line above to 0.6 at best.
    yield {"name": "messages_past_caches", "value": mail["past"], "unit": "1 = yes", "target": None}
    yield line("pull_vs_copy", mail["pull"] / mail["copy"], 0.5)
    yield from _kernels()
    yield from _adam()
    yield line("idle_server", mail["idle"], 0.05, "of a core") | {"most": True}


def line(name: str, value: float, target: float | None, unit: str = "x") -> dict:
    return {"name": name, "value": round(value, 3), "unit": unit, "target": target}


def mailbox(threads: int = 1, transport: str = "shared") -> dict[str, float]:
    """GB/s of one pusher and one server as two ranks of a job, and the server's rest."""
    return json.loads(under_mpi(2, PROGRAM, threads, transport))


def _kernels() -> Iterator[dict]:
    """Pushed bytes per second of the kernel on one message and on eight at once, against `a += b`.

    On the same arrays: where memory happens to lie makes a difference of 15 %.
    """
    weights, states = np.zeros(SIZE, np.float32), np.zeros((0, SIZE), np.float32)
    rule = rules.RULES["descent"]
    rows = rules.coefficients(rule, Settings(), 1.0, BatchCounts(0, 1, 1))
    # As in a ring: messages are a little more than their values apart.
    apart = SIZE + message_words(0, MOST_BATCHES)
    mail, starts = np.ones(MESSAGES * apart, np.float32), apart * np.arange(MESSAGES)
    scales = np.full(MESSAGES, 1e-3, np.float32)

    def fold(count: int) -> None:
        kernels.step(rule.kernel, weights, states, mail, starts[:count], scales[:count], rows)

    times = interleaved(
        {
            "add": lambda: np.add(weights, mail[:SIZE], out=weights),
            "single": lambda: fold(1),
            "eight": lambda: fold(MESSAGES),
        },
        SECONDS,
    )
    yield line("apply_kernel_vs_add", times["add"].wall / times["single"].wall, 0.8)
    yield line("fold_of_8_vs_1", MESSAGES * times["single"].wall / times["eight"].wall, 1.8)


@njit(nogil=True, error_model="numpy")
def _plain_adam(
    weights: np.ndarray, moments: np.ndarray, squares: np.ndarray, gradient: np.ndarray, numbers: np.ndarray
) -> None:
    """Take a step of Adam in one loop, as a compiled program without servers would."""
    turn = numbers[3]
    keep = numbers[4]
    take = numbers[5]
    gain = numbers[6]
    epsilon = numbers[7]
    for i in range(weights.size):
        moments[i] += turn * (gradient[i] - moments[i])
        squares[i] = keep * squares[i] + take * (gradient[i] * gradient[i])
        weights[i] -= gain * moments[i] / (np.sqrt(squares[i]) + epsilon)


def _adam() -> Iterator[dict]:
    """Steps of Adam per second on one message, and pushes per second of four at once, against a plain loop.

    On the same arrays, in turns.
    """
    rule = rules.RULES["adam"]
    weights, states = np.zeros(SIZE, np.float32), np.zeros((2, SIZE), np.float32)
    apart = SIZE + message_words(0, MOST_BATCHES)
    mail, starts = np.full(FOLDED * apart, 1e-3, np.float32), apart * np.arange(FOLDED)
    row = rules.coefficients(rule, Settings(), 1e-3, BatchCounts(100, 1, 1))

    def step(count: int) -> None:
        scales, rows = np.ones(count, np.float32), np.repeat(row, count, axis=0)
        kernels.step(rule.kernel, weights, states, mail, starts[:count], scales, rows)

    times = interleaved(
        {
            "plain": lambda: _plain_adam(weights, *states, mail[:SIZE], row[0]),
            "single": lambda: step(1),
            "folded": lambda: step(FOLDED),
        },
        SECONDS,
    )
    yield line("adam_kernel_vs_plain_loop", times["plain"].wall / times["single"].wall, 0.8)
    yield line(f"adam_fold_of_{FOLDED}_vs_1", FOLDED * times["single"].wall / times["folded"].wall, None)
