"""A layer larger than the memory that any rank may use is trained, kept, gone on with and evaluated on many ranks."""

import os
import re
import shutil
import tracemalloc

import numpy as np
import pytest
from launch import given
from mpi4py import MPI

from adam_mpi.checkpoint import model_file, store_file, stores
from adam_mpi.checkpoint.store_file import Record, StoreFile
from adam_mpi.cli import main
from adam_mpi.model.parameters import Tensor
from adam_mpi.sharding.shards import Shard, Spans

ROWS, COLUMNS, COUNT = 1024, 4096, 64
SIZE = ROWS * COLUMNS
TENSOR = Tensor("dense1/weight", "dense1", (ROWS, COLUMNS), 0, SIZE)
VALUES = np.arange(SIZE, dtype=np.float32)
SPANS = [(5 * SIZE // COUNT, 6 * SIZE // COUNT), (40 * SIZE // COUNT, 41 * SIZE // COUNT)]


def peak(work):
    """What it returns, and how many bytes it had at the most."""
    tracemalloc.start()
    try:
        return work(), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def few(work):
    """What it returns, with less memory than a quarter of all parameters."""
    found, most = peak(work)
    assert most < VALUES.nbytes / 4, f"{most} bytes of {VALUES.nbytes}"
    return found


def check(found):
    for start, stop in SPANS:
        np.testing.assert_array_equal(found[start:stop], VALUES[start:stop])


def test_a_part_of_a_file_of_weights_takes_the_memory_of_that_part(tmp_path, monkeypatch):
    monkeypatch.setattr(model_file, "PIECE", SIZE // COUNT)
    model_file.write_model(tmp_path / "weights.h5", VALUES, [TENSOR], "", "{}")

    def read():
        part = Spans(SPANS)
        for start, values in model_file.model_pieces(tmp_path / "weights.h5", [TENSOR], spans=SPANS):
            part.put(start, values.reshape(-1))
        return part

    check(few(read))


@pytest.fixture
def store(tmp_path):
    """A store with all parameters in shards, of which the second slots are newer."""
    size = SIZE // COUNT
    shards = [Shard(index, "dense1", index * size, size) for index in range(COUNT)]
    file = StoreFile(tmp_path / "server-00000.h5", shards, ["weights", "state"], 16)
    for version in (1, 2):
        for place, shard in enumerate(shards):
            weights = VALUES[shard.start : shard.stop] * (version == 2)
            file.write([Record(place, version, 1, 1, np.concatenate([weights, -weights]).view(np.uint8))])
    file.close()
    return tmp_path / "server-00000.h5"


def test_a_part_of_a_store_takes_the_memory_of_that_part(store):
    found = few(lambda: {piece.start: piece.values["weights"] for piece in store_file.store_pieces(store, SPANS)})
    assert sorted(found) == [start for start, _ in SPANS]
    for start, stop in SPANS:
        np.testing.assert_array_equal(found[start], VALUES[start:stop])


def test_a_store_that_is_passed_round_takes_the_memory_of_a_ranks_part(store):
    found = few(lambda: stores.read_everywhere(MPI.COMM_SELF, store.parent, {store.name: 0}, SIZE, SPANS))
    check(found["weights"])
    found["state"].flat *= -1
    check(found["state"])


CLASSES, UNITS, SIDE, BATCH, SERVERS = 16, 65536, 64, 8, 12
LAYER = 4 * UNITS * SIDE * SIDE
LIMIT, PLANNED = 1000 << 20, 460 << 20
"""Bytes of address space of every rank, and those of them that are not code, libraries, stacks and MPI's own memory."""
SITE = f"""
import os, resource
if os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"):
    resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
"""


@pytest.fixture
def limited(tmp_path):
    """An environment in which ranks have so much memory, and little of it goes to arenas and to each pair of ranks."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMPI_MCA_btl_sm_segment_size": str(1 << 20)}
    yield {"PYTHONPATH": path, "ADAM_MPI_SURVIVE": "no", **own}
    # Several GB.
    shutil.rmtree(tmp_path / "job-0", ignore_errors=True)


def settings(tmp_path, strips, epochs):
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (5 * BATCH, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(len(images)) % CLASSES
    cut, path = 2 * BATCH, tmp_path / "noise.npz"
    np.savez(
        path, train_images=images[:cut], train_labels=labels[:cut], test_images=images[cut:], test_labels=labels[cut:]
    )
    layers = f'[{{kind = "dense", units = {UNITS}}}, "relu", {{kind = "dense", units = {CLASSES}}}]'
    return given(
        f"data.set={path}",
        "data.validation=0",
        f"train.batch={BATCH}",
        f"train.epochs={epochs}",
        "layout.data=1",
        f"model.layers={layers}",
        "consistency.staleness=0",
        f"layout.servers={SERVERS}",
        f"layout.partitions={strips}",
        "worker.threads=1",
        "worker.in_flight=1",
        "optimizer.learning_rate=0.001",
        "cluster.transport=send",
        "server.copies=1",
        f"server.mailbox_bytes={16 << 20}",
        "optimizer.schedule=constant",
        f"layout.memory={PLANNED}",
    )


def trained(job):
    assert job.returncode == 0 and job.summary["status"] == "done", job.said()
    return job


@pytest.mark.full
@pytest.mark.timeout(900)
def test_a_layer_larger_than_a_ranks_memory(launch, limited, tmp_path, capsys):
    assert LIMIT < LAYER
    assert main(["plan", "-n", "27", *settings(tmp_path, 1, 1)]) == 2
    found = re.search(r"dense1 alone has 1 GB of weights; set layout.partitions = (\d+) or", capsys.readouterr().err)
    assert found and 1 < int(found[1]) <= 14
    options = {"environment": limited, "timeout": 300}
    first = trained(launch(1 + SERVERS + 14, "train", *settings(tmp_path, 14, 1), **options))
    more = settings(tmp_path, 16, 2)
    again = trained(launch(1 + SERVERS + 16, "train", "--run", first.run, "--resume", *more, **options))
    assert again.summary["resumed"].startswith("snapshot epoch-0001, nothing lost")
    one, two = (line["loss"] for line in again.metrics() if line["part"] == "train" and line["done"])
    assert two < one
    judged = launch(4, "eval", again.run, **options)
    told = f"test: accuracy {again.summary['test_accuracy']:.4f}, loss {again.summary['test_loss']:.4f}"
    assert judged.returncode == 0 and told in judged.stdout, judged.said()
    alone = launch(1, "eval", again.run, **options)
    assert alone.returncode == 2 and "evaluate on several ranks: mpirun -n RANKS" in alone.stderr, alone.said()
    # The limit is real: this one reads the weights into one process.
    alone = launch(1, "inspect", "--layers", again.run, **options)
    assert alone.returncode == 1 and "Unable to allocate 1.00 GiB" in alone.stderr, alone.said()
