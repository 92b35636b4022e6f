"""Kills a server again and again while it writes its store, and checks what it leaves; run by test_store.py.

    fuzz_store.py FOLDER KILLS

The server is a forked process with the real write-behind; before each update it reports through a pipe what it has
applied and how far behind its store is. Everything that was applied before that must be on disk.
"""

import os
import random
import signal
import struct
import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

from adam_mpi.base.files import file_checksum
from adam_mpi.checkpoint import store_file
from adam_mpi.checkpoint.write_behind import WriteBehind
from adam_mpi.config import Store
from adam_mpi.sharding.shards import Shard
from adam_mpi.sharding.training_state import Position

SIZES = (700, 64, 5000, 1, 2048)
SHARDS = [Shard(i, "dense1", start, stop - start) for i, (start, stop) in enumerate(pairwise(np.cumsum((0, *SIZES))))]
PARTS = ("weights", "state")
REPORT = struct.Struct("=qdd")
"""Update, when it was applied, and the time before which every update is on disk."""


def values(version, place):
    """What a shard holds at a version; two parts that disagree show a torn write."""
    body = np.empty((2, SIZES[place]), np.float32)
    body[0], body[1] = version, -version
    return body.view(np.uint8).reshape(-1)


def serve(path, pipe):
    position = Position(100)

    def copy(place, buffer):
        buffer[:] = position.pack() if place == len(SHARDS) else values(position.images, place)
        return position.images, position.images, 0.0

    store = WriteBehind(path, Store(interval=0.02), SHARDS, PARTS, Position.packed_bytes(100), copy)
    while True:
        store.step()
        if store.complete:
            position.images += 1
            for place in range(len(SHARDS) + 1):
                store.mark_dirty(place)
            applied = time.monotonic()
            os.write(pipe, REPORT.pack(position.images, applied, applied - store.lag))
            store.note_acknowledged(position.images, position.images)
        time.sleep(1e-4)  # as a server does between two steps; the writing thread shares the interpreter with it


def check(path, received):
    """Check that every shard is whole and has all updates that the last report promises; return how many are lost."""
    stored = store_file.read_store(path)
    pieces, packed = stored.pieces, stored.position
    reports = list(REPORT.iter_unpack(received[: len(received) // REPORT.size * REPORT.size]))
    promise = reports[-1][2]
    least = max([images for images, applied, _ in reports if applied < promise], default=0)
    for place, piece in enumerate(pieces):
        assert piece is not None, f"shard {place} has no whole version"
        assert piece.images >= least, f"shard {place} has update {piece.images}, {least} was promised"
        body = np.concatenate([piece.values[part] for part in PARTS]).view(np.uint8)
        assert np.array_equal(body, values(piece.images, place)), f"shard {place} is torn"
        assert piece.pushes <= piece.images, f"shard {place} claims a push that is not in it"
    assert packed is not None and Position.unpack(packed).images >= least
    lost = reports[-1][0] - min(piece.images for piece in pieces)
    # What is acknowledged is noted a moment later: of the last few updates before the kill the store may not know.
    assert 0 <= stored.lost[1] <= lost, f"{stored.lost} are reported as lost, {lost} are"
    return lost


def main():
    folder, kills = Path(sys.argv[1]), int(sys.argv[2])
    draw, lost = random.Random(7), []
    file_checksum(np.zeros(1, np.float32))  # compiled before the first fork
    for attempt in range(kills):
        path = folder / f"{attempt}.h5"
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(reader)
            serve(path, writer)
        os.close(writer)
        received = os.read(reader, REPORT.size)
        time.sleep(draw.uniform(0, 0.05))  # a random moment
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        while part := os.read(reader, 1 << 16):
            received += part
        os.close(reader)
        lost.append(check(path, received))
        path.unlink()
    print(f"{kills} kills, every shard whole each time; updates lost: at most {max(lost)}, mean {np.mean(lost):.1f}")


if __name__ == "__main__":
    main()
