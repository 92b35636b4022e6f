"""What a delay between hosts costs a replica over them, and how much of it micro-batches in flight hide.

The paper's MNIST model in three strips on three test hosts (scripts/hosts), over TCP; micro-batches of 256 images. Each
round is a job on hosts that send at once, and one on hosts whose packets arrive 1 ms later; in each of them one
micro-batch in flight and four take turns. `delay_hidden`: of the time that the delay adds to a micro-batch with one in
flight, the share that four do not take.
"""

import argparse
import json
import subprocess
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median

import _jobs

HOSTS, RANKS = _jobs.ROOT / "scripts" / "hosts", Path(__file__).with_name("_delay_ranks.py")
STRIPS, DELAYS, ROUNDS = 3, ("0ms", "1ms"), 2
# Open MPI says much about what it does when ranks are lost.
QUIETLY = {"ADAM_MPI_SURVIVE": "no"}


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    compute: list[float] = []
    with ExitStack() as stack:
        labs = {delay: stack.enter_context(hosts(delay)) for delay in DELAYS}
        for delay, lab in [pair for _ in range(ROUNDS) for pair in labs.items()]:
            found = json.loads(_jobs.under_mpi(STRIPS, RANKS, environment={"ADAM_MPI_HOSTS": lab} | QUIETLY))
            compute.append(found["compute_ms"])
            for in_flight, taken in found["ms"].items():
                times[in_flight, delay] += taken
    taken = {key: round(median(values), 2) for key, values in times.items()}
    added = {count: taken[count, DELAYS[1]] - taken[count, DELAYS[0]] for count in ("1", "4")}
    described = {f"ms_{count}_in_flight": [taken[count, delay] for delay in DELAYS] for count in added}
    yield {
        "name": "delay_hidden",
        "value": round(1 - added["4"] / added["1"], 2),
        "unit": "share",
        "target": 0.5,
        "compute_ms_per_batch": round(median(compute), 1),
        **described,
    }
    ratio = taken["1", DELAYS[1]] / taken["4", DELAYS[1]]
    yield {"name": "delayed_in_flight_4_vs_1", "value": round(ratio, 2), "unit": "x"}


@contextmanager
def hosts(delay: str) -> Iterator[str]:
    """Test hosts for a while."""
    with tempfile.TemporaryDirectory() as lab:
        subprocess.run([HOSTS, "up", lab, str(STRIPS), "--delay", delay], check=True, timeout=60)
        try:
            yield lab
        finally:
            subprocess.run([HOSTS, "down", lab], check=True, timeout=60)
