"""The store and snapshots of a server, each against what the machine does without them in the same run.

`apply_with_store`: pushed bytes applied per second with the store on against off, at the default `store.interval`.
`write_vs_plain`: bytes per second of a store's writes, checksums and waits for the disk included, against a plain
write of the same file. `snapshot`: seconds from the order, which is what USR1 leads to, until the snapshot is whole.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import numpy as np
from _jobs import LAUNCH, ROOT
from mpi4py import MPI

from adam_mpi import ParameterServer
from adam_mpi.checkpoint.store_file import Record, StoreFile
from adam_mpi.checkpoint.write_behind import BUFFERS
from adam_mpi.cluster.control_messages import SnapshotHeld, SnapshotWritten
from adam_mpi.cluster.idle import Idle
from adam_mpi.cluster.layout import Layout, Place
from adam_mpi.runtime.begin_generation import SWITCH_SECONDS
from adam_mpi.runtime.snapshot_coordinator import SnapshotCoordinator
from adam_mpi.runtime.snapshot_seal import SnapshotSettings
from adam_mpi.sharding.shards import Shard

SHARD, SHARDS, ROUNDS = 262_144, 128, 5
PARTS = ("weights", "state")
PROGRAM = Path(__file__).with_name("_store_mail.py")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", help="where to write (default: a temporary folder)")
    parser.add_argument("--megabytes", type=int, default=1024, help="parameters in the snapshot")


def measure(arguments: argparse.Namespace) -> Iterator[dict]:
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        yield {"name": "apply_with_store", "value": round(_apply(folder), 3), "unit": "x", "target": 0.95}
        plain, ours = _write(Path(folder))
        yield {"name": "plain_write", "value": round(plain, 3), "unit": "GB/s"}
        yield {"name": "write_vs_plain", "value": round(ours / plain, 3), "unit": "x", "target": 0.7}
        seconds, alone = _snapshot(Path(folder), arguments.megabytes)
        yield {"name": f"snapshot_of_{arguments.megabytes}_MB", "value": round(seconds, 3), "unit": "s"}
        yield {"name": "snapshot_vs_plain_write", "value": round(alone / seconds, 3), "unit": "x"}


def _apply(folder: str) -> float:
    """Return the speed of a job of a pusher and a server with the store relative to without, measured in turns."""
    mpirun = shutil.which("mpirun", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    assert mpirun, "no mpirun beside this Python or on PATH"
    command = ["bash", "-c", LAUNCH, ROOT / "scripts" / "lib.sh", mpirun, "2", sys.executable, PROGRAM, folder]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True, timeout=300)
    rates = json.loads(done.stdout)
    return median(on / off for on, off in zip(rates["on"], rates["off"], strict=True))


def _write(folder: Path) -> tuple[float, float]:
    """Return (plain, ours) in GB/s: shards of 1 MB with their state, all of them once per round."""
    shards = [Shard(index, "dense1", index * SHARD, SHARD) for index in range(SHARDS)]
    body = np.random.default_rng(0).standard_normal(2 * SHARD, np.float32).view(np.uint8)
    store = StoreFile(folder / "store.h5", shards, PARTS, 8)
    plain = os.open(folder / "plain", os.O_RDWR | os.O_CREAT)
    os.posix_fallocate(plain, 0, len(shards) * body.nbytes)
    seconds: dict[str, list[float]] = {"plain": [], "ours": []}
    for version in range(1, ROUNDS + 1):
        start = time.perf_counter()
        for index in range(len(shards)):
            os.pwrite(plain, body, index * body.nbytes)
        os.fsync(plain)
        middle = time.perf_counter()
        for first in range(0, len(shards), BUFFERS):
            store.write([Record(place, version, 0, version, body) for place in range(first, first + BUFFERS)])
        seconds["plain"].append(middle - start)
        seconds["ours"].append(time.perf_counter() - middle)
    store.close()
    os.close(plain)
    size = len(shards) * body.nbytes / 1e9
    return size / median(seconds["plain"]), size / median(seconds["ours"])


def _snapshot(folder: Path, megabytes: int) -> tuple[float, float]:
    """Return the seconds of a snapshot of one server, and of a plain write of as many bytes.

    The server has `megabytes` of weights and as much optimizer state.
    """
    sys.setswitchinterval(SWITCH_SECONDS)
    server = ParameterServer(MPI.COMM_SELF, megabytes << 18, optimizer="adagrad")
    world = server.world
    world.layout = Layout((Place(0, world.hosts[0], ("data", "worker", "server"), 0, 0),), 1)
    told = {"epochs": 0, "config": "", "inputs": "{}", "best": 0.0, "best_epoch": 0}
    settings = SnapshotSettings(folder / "snapshots", servers=[0], tensors=server.memory_layout.tensors)
    snapshots = SnapshotCoordinator(server.channel, settings, lambda: told)
    seconds, plain = [], []
    for _ in range(3):
        start, idle = time.perf_counter(), Idle("sleep")
        snapshots.order()
        while snapshots.busy:
            server.step()
            idle.back_off(False)
            for source, message in server.channel.receive():
                if isinstance(message, SnapshotHeld | SnapshotWritten):
                    snapshots.handle(source, message)
                else:
                    server.server.handle(message)
        assert not snapshots.error, snapshots.error
        middle = time.perf_counter()
        with (folder / "plain").open("wb") as file:
            for shard in 2 * list(server.server.session.published.weights.values()):
                file.write(shard.data)
            os.fsync(file.fileno())
        seconds.append(middle - start)
        plain.append(time.perf_counter() - middle)
        (folder / "plain").unlink()
    return median(seconds), median(plain)
