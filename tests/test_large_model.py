"""A layer larger than the memory that any rank may use is trained, kept, gone on with and evaluated on many ranks."""

import os

import numpy as np
import pytest
from launch import given

CLASSES, UNITS, SIDE, BATCH = 16, 65520, 64, 8
LAYER = 4 * UNITS * SIDE * SIDE
LIMIT = 1000 << 20
"""Bytes of address space of every rank: code, libraries and MPI's own memory included."""
SITE = f"""
import os, resource
if os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"):
    resource.setrlimit(resource.RLIMIT_AS, ({LIMIT}, {LIMIT}))
"""
pytestmark = [pytest.mark.full, pytest.mark.timeout(1500)]


@pytest.fixture
def limited(tmp_path):
    """An environment in which ranks have so much memory, and little of it goes to arenas and to each pair of ranks."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    own = {"MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1", "OMPI_MCA_btl_sm_segment_size": str(1 << 20)}
    return {"PYTHONPATH": path, **own}


def settings(tmp_path, strips, epochs):
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (5 * BATCH, SIDE, SIDE), dtype=np.uint8)
    labels = np.arange(len(images)) % CLASSES
    cut, path = 2 * BATCH, tmp_path / "noise.npz"
    np.savez(path, train_images=images[:cut], train_labels=labels[:cut],
             test_images=images[cut:], test_labels=labels[cut:])  # fmt: skip
    layers = f'[{{kind = "dense", units = {UNITS}}}, "relu", {{kind = "dense", units = {CLASSES}}}]'
    return given(
        f"data.set={path}", "data.validation=0", f"train.batch={BATCH}", f"train.epochs={epochs}", "layout.data=1",
        f"model.layers={layers}", "consistency.staleness=0", "layout.servers=12", f"layout.partitions={strips}",
        "worker.threads=1", "worker.in_flight=1", "optimiser.rate=0.001", "cluster.transport=send",
        f"server.mailbox_bytes={16 << 20}", "optimiser.schedule=constant",
    )  # fmt: skip


def test_a_layer_larger_than_a_ranks_memory(launch, limited, tmp_path):
    assert LIMIT < LAYER
    first = launch(27, "train", *settings(tmp_path, 14, 1), environment=limited, timeout=600)
    assert first.returncode == 0, first.said()
    again = launch(
        29, "train", "--run", first.run, "--resume", *settings(tmp_path, 16, 2), environment=limited, timeout=600
    )
    assert again.returncode == 0 and again.summary["status"] == "done", again.said()
    assert again.summary["train_loss"] < first.summary["train_loss"] and "test_accuracy" in again.summary
    # One rank cannot hold it: the limit is real.
    alone = launch(14, "train", *settings(tmp_path, 1, 1), environment=limited, timeout=600)
    assert alone.returncode != 0 and "emory" in alone.said(), alone.said()
