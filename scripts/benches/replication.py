"""What copies of the shards cost: pushes per second with 1, 2 and 3, and what a store adds to the longest waits.

Four pushers and three servers in one job, with the numbers of copies in turns. `copies_3_vs_1`: bytes pushed and
acknowledged per second. `acknowledge_99_store`: the 99th percentile of the time from a push until three servers have
it, with the store on against off.
"""

import argparse
import json
import tempfile
from collections.abc import Iterator
from pathlib import Path

from _jobs import under_mpi

PROGRAM = Path(__file__).with_name("_replication_mail.py")
RANKS = 7


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    with tempfile.TemporaryDirectory() as folder:
        found = json.loads(under_mpi(RANKS, PROGRAM, folder))
    for copies in ("1", "2", "3"):
        yield {
            "name": f"pushed_{copies}",
            "value": round(found["rates"][copies], 3),
            "unit": "GB/s",
            "fold": round(found["folds"][copies], 2),
        }
    for copies, target in (("2", None), ("3", 0.4)):
        ratio = round(found["rates"][copies] / found["rates"]["1"], 3)
        yield {"name": f"copies_{copies}_vs_1", "value": ratio, "unit": "x", "target": target}
    off, on = found["waits"]["off"], found["waits"]["on"]
    yield {"name": "acknowledge_99", "value": round(1e3 * off, 2), "unit": "ms"}
    yield {"name": "acknowledge_99_store", "value": round(on / off, 3), "unit": "x", "target": 2.0, "most": True}
