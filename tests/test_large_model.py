"""A layer larger than the memory that a rank may use: it is trained, kept, gone on with and evaluated on many ranks."""

import os

import numpy as np
import pytest
from launch import given

CLASSES, UNITS, SIDE, BATCH = 4, 65536, 32, 4
LAYER = 4 * UNITS * SIDE * SIDE
ROOM = LAYER * 15 // 16
"""What a rank may take besides what its libraries have taken before they do anything."""
SITE = f"""
import os, resource
if os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ.get("PMI_RANK"):
    import h5py, llvmlite, numba, numpy, scipy.linalg
    pages = int(open("/proc/self/statm").read().split()[0])
    limit = pages * resource.getpagesize() + {ROOM}
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""
pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]


@pytest.fixture
def limited(tmp_path):
    """An environment in which ranks have so much memory, and an arena of it for all their threads."""
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {"PYTHONPATH": path, "MALLOC_ARENA_MAX": "1", "OPENBLAS_NUM_THREADS": "1"}


def settings(tmp_path, strips, epochs):
    draw = np.random.default_rng(1)
    images = draw.integers(0, 256, (5 * BATCH, SIDE, SIDE), dtype=np.uint8)
    labels = draw.integers(0, CLASSES, len(images))
    cut, path = 2 * BATCH, tmp_path / "noise.npz"
    np.savez(path, train_images=images[:cut], train_labels=labels[:cut],
             test_images=images[cut:], test_labels=labels[cut:])  # fmt: skip
    layers = f'[{{kind = "dense", units = {UNITS}}}, "relu", {{kind = "dense", units = {CLASSES}}}]'
    return given(
        f"data.set={path}", "data.validation=0", f"train.batch={BATCH}", f"train.epochs={epochs}", "layout.data=1",
        f"model.layers={layers}", "consistency.staleness=0", "layout.servers=6", f"layout.partitions={strips}",
        "worker.threads=1", "worker.in_flight=1", "optimiser.rate=0.001", "cluster.transport=send",
        f"server.mailbox_bytes={16 << 20}", "optimiser.schedule=constant",
    )  # fmt: skip


def test_a_layer_larger_than_a_ranks_memory(launch, limited, tmp_path):
    first = launch(19, "train", *settings(tmp_path, 12, 1), environment=limited, timeout=300)
    assert first.returncode == 0, first.said()
    again = launch(
        21, "train", "--run", first.run, "--resume", *settings(tmp_path, 14, 2), environment=limited, timeout=300
    )
    assert again.returncode == 0 and again.summary["status"] == "done", again.said()
    assert again.summary["train_loss"] < first.summary["train_loss"] and "test_accuracy" in again.summary
    # One rank cannot hold it: the limit is real.
    alone = launch(8, "train", *settings(tmp_path, 1, 1), environment=limited, timeout=300)
    assert alone.returncode != 0 and "emory" in alone.said(), alone.said()
