"""A model in two strips: what exchanges between them cost, how much of it computing hides, and what a delay costs.

The AlexNet-like model, two ranks with a trainer thread each; the contenders of a line take turns.
`exchange_mpi_vs_shared`: all exchanges of 32 images with nothing else to do, by messages against through memory that
both see. `strips_vs_ranks`: images per second of one replica of two strips, with batches of 64 in two parts, against
two replicas of one rank with batches of 32; sums of gradients over the strips are included. `exchange_hidden`: of the
time in which those parts waited for the other strip, the share in which the thread computed the other one.
`hybrid_vs_ranks`: the same of a hybrid replica, in rounds of 32 images.
`border_first_cpu_vs_whole`: what a strip computes, border columns first, against all columns of a layer at once, by
seconds of CPU; `border_first_late_vs_whole`: the same by images per second, with one part in flight whose exchanges are
held back by 2 ms.
`in_flight_4_vs_1`: four batches of one image in flight against one, with every exchange held back by 2 ms; then the
same with batches of four images, of which the delay is a smaller share.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import _jobs

RANKS = Path(__file__).with_name("_halo_ranks.py")
TARGETS = {"exchange_hidden": 0.8, "strips_vs_ranks": 0.8, "in_flight_4_vs_1": 1.6}


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    for line in _jobs.under_mpi(2, RANKS).splitlines():
        found = json.loads(line)
        yield {**found, "target": TARGETS.get(found["name"])}
