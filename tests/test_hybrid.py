"""Hybrid replicas: ranks split images up to the first dense layer, then units; they agree with one rank."""

import re
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given as drawn
from hypothesis import settings as limits
from hypothesis import strategies as st
from launch import available
from strips import exchange, gather, run, scatter
from test_partition import PAPER
from test_strip_context import STACKS
from test_strip_jobs import CASES, STEPS, losses, noise, result, same, settings, trained
from test_survival import survive

from adam_mpi import config
from adam_mpi.base import machine
from adam_mpi.base.errors import UserError
from adam_mpi.model.engine import jit, program
from adam_mpi.model.engine.engine_context import EngineStripContext
from adam_mpi.model.exchange import BACK, FORWARD, Assembly, AssemblyBuffers
from adam_mpi.model.layers import Conv, Dense, infer
from adam_mpi.model.network import Network
from adam_mpi.model.parameters import initial, total
from adam_mpi.model.partition import partition
from adam_mpi.model.reference_strip_context import StripContext
from adam_mpi.planning.report import plan_text
from adam_mpi.sharding import batches
from adam_mpi.sharding.batches import cut_rounds, image_batch, shares

IMAGES = 9
BATCH = 104
HYBRID = "layout.scheme=hybrid"
WITH_CONV = [stack for stack, (_, layers) in STACKS.items() if any(isinstance(layer, Conv) for layer in layers)]
QUICK = ("odd width", "normalize and dropout", "overlapping pools")
full = pytest.mark.full


def prepare(stack, ranks):
    shape, layers = STACKS[stack]
    try:
        cut = partition(infer(layers, shape, 5), ranks, "hybrid")
    except UserError as error:
        pytest.skip(str(error))
    random = np.random.default_rng(4)
    weights = initial(cut.shapes, 3) + 0.05 * random.standard_normal(total(cut.shapes))
    pixels = random.integers(0, 256, (IMAGES, *shape), dtype=np.uint8)
    return cut, weights, (pixels, random.integers(0, 5, IMAGES), random.permutation(1000)[:IMAGES])


def check(cut, contexts, weights, batch, rel):
    """Compare loss, gradient and evaluation of several numbers of images with one rank; some ranks may have none."""
    whole = Network(cut.shapes, IMAGES, 11, np.float64).context()
    own = scatter(cut, weights)
    gradients = [np.full_like(part, np.nan) for part in own]
    exact = weights.astype(np.float64)
    for count in (IMAGES, 1, IMAGES - 2):
        pixels, labels, ids = (values[:count] for values in batch)
        edges = shares(count, len(cut))
        gradient = np.zeros_like(exact)
        given = [pixels[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        loss, correct = whole.train(exact, gradient, pixels, labels, ids, 2)
        each = list(zip(contexts, own, gradients, given, strict=True))
        for found in run(contexts, [c.begin(w, g, seen, labels, ids, 2, edges) for c, w, g, seen in each]):
            assert found == (pytest.approx(loss, rel=rel), correct)
        atol = rel * max(1, np.abs(gradient).max())
        np.testing.assert_allclose(gather(cut, gradients), gradient, rtol=rel, atol=atol)
        loss, correct = whole.evaluate(exact, pixels, labels)
        for found in run(contexts, [c.begin(w, None, seen, labels, ids, 2, edges) for c, w, _, seen in each]):
            assert found == (pytest.approx(loss, rel=rel), correct)


@pytest.mark.parametrize("stack", WITH_CONV)
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_loss_and_gradient_agree_with_one_rank(stack, ranks):
    cut, weights, batch = prepare(stack, ranks)
    check(cut, [StripContext(strip, IMAGES, 11, np.float64) for strip in cut.strips], weights, batch, 1e-9)


def check_generated(stack, ranks, lanes, make):
    cut, weights, batch = prepare(stack, ranks)
    programs = [program.build(strip.stack, IMAGES, lanes, 16) for strip in cut.strips]
    contexts = [
        EngineStripContext(strip, IMAGES, 11, built, make(built.text, built.lanes))
        for strip, built in zip(cut.strips, programs, strict=True)
    ]
    check(cut, contexts, weights.astype(np.float32), batch, 1e-5)
    return programs


@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=full)])
@pytest.mark.parametrize("stack", [s if s in QUICK else pytest.param(s, marks=full) for s in WITH_CONV])
def test_generated_programs_agree(stack, ranks):
    for built in check_generated(stack, ranks, 2, jit.uncompiled):
        assert built.own_blocks == {2: 3, 3: 2}[ranks] < built.blocks == 5


# Compiling takes seconds per rank, more on a busy machine.
@full
@pytest.mark.timeout(600)
def test_compiled_programs_agree():
    check_generated("overlapping pools", 2, machine.lanes(), jit.run)


@pytest.mark.parametrize("lanes", [1, 4])
@pytest.mark.parametrize("edges", [(0, 3, 5, 9), (0, 0, 4, 4), (0, 5, 9, 14)])
def test_errors_return_by_the_adjoint_of_the_forward_exchange(edges, lanes):
    random = np.random.default_rng(2)
    ranks = len(edges) - 1
    values = ((0, 6),) * ranks
    blocks = -(-edges[-1] // lanes)
    own = -(-max(np.diff(edges)) // lanes)

    def some(count, images):
        """Return random values of `images` images in `count` blocks."""
        return random.random((count, 6, lanes)) * (np.arange(count * lanes).reshape(count, 1, lanes) < images)

    sides = []
    for rank in range(ranks):
        arrays = some(own, edges[rank + 1] - edges[rank]), some(blocks, 0), some(own, 0), some(blocks, edges[-1])
        sides.append(AssemblyBuffers(Assembly("dense1", values, values, 1), rank, *arrays))
        sides[-1].edges = edges
    exchange(sides, FORWARD)
    for side in sides[1:]:
        np.testing.assert_array_equal(side.needed, sides[0].needed)
    exchange(sides, BACK)
    forward = sum(np.vdot(side.needed, side.needed_errors) for side in sides)
    assert forward == pytest.approx(sum(np.vdot(side.owned, side.owned_errors) for side in sides), rel=1e-12)


@limits(max_examples=200, deadline=None)
@drawn(st.integers(0, 300), st.integers(1, 6), st.integers(1, 300))
def test_rounds_have_every_image_once_and_fit_their_room(images, ranks, more):
    count = batches.count_parts(images, ranks, ranks)
    edges = shares(images, ranks)
    seen = []
    for rank in range(ranks):
        pixels = np.arange(images)[edges[rank] : edges[rank + 1]]
        batch = replace(image_batch(0, np.arange(images), np.arange(images), pixels), edges=edges)
        for number, part in enumerate(cut_rounds(batch, count, rank)):
            a, b = part.edges[rank : rank + 2]
            np.testing.assert_array_equal(part.ids[a:b], part.pixels)
            assert part.labels.size <= (room := batches.largest_part(images + more, ranks, ranks))
            assert b - a <= -(-room // ranks)
            seen += [(number, image) for image in part.pixels] if part.edges[-1] == part.ids.size else []
    assert sorted(image for _, image in seen) == list(range(images))


def test_only_units_are_cut():
    cut = partition(PAPER, 3, "hybrid")
    assert {shape.name for shape in cut.strips[1].shapes if shape.extent is None} == {
        "conv1",
        "relu1",
        "max_pool1",
        "conv2",
        "relu2",
        "max_pool2",
    }
    first, *others = cut.exchanges.values()
    assert isinstance(first, Assembly) and not any(isinstance(other, Assembly) for other in others)
    whole = partition(PAPER, 1).strips[0]
    assert sum(strip.flops for strip in cut.strips) == pytest.approx(whole.flops, rel=1e-3)
    sent, received = zip(*(cut.traffic(strip) for strip in range(3)), strict=True)
    assert sum(sent) == sum(received)


def test_models_that_cannot_be_hybrid_are_refused():
    with pytest.raises(UserError, match='^layout.scheme = "hybrid": the model has no convolution'):
        partition(infer([Dense(9), Dense(5)], (1, 5, 7), 5), 2, "hybrid")
    with pytest.raises(UserError, match="^layout.partitions = 11: dense3 has 10 units; set at most 10$"):
        partition(PAPER, 11, "hybrid")
    with pytest.raises(UserError, match="layout.scheme"):
        config.load(None, ["layout.scheme=columns"])


def test_the_plan_shows_images_rounds_and_units():
    text = plan_text(config.load(None, ["layout.partitions=2", HYBRID, "train.batch=128"]), 4, None)
    assert "2 ranks, hybrid: each has 64 whole images of a batch before dense1, in 2 rounds" in text
    assert "  dense1     0-199  200-399\n" in text and not re.search("^  conv2 ", text, re.M)
    assert re.search(r"^  dense3     0-4 \(0\+(\d+)\)  5-9 \(\1\+0\)$", text, re.M)


def smooth(case):
    """Return shape and layers of a case, with averages instead of maxima.

    In 50 steps of 104 images some window has two largest values that differ by less than float32 resolves (2e-8, "pad
    3", step 6): rounding then decides which of them learns.
    """
    shape, text = CASES[case]
    return shape, text.replace(" p", " a")


def hybrid(launch, path, text, ranks, replicas, *more):
    return trained(launch, path, text, ranks, replicas, f"train.batch={BATCH}", *more)


JOBS = {"odd width": [(2, 2)]}
FURTHER = {case: [(1, 1), (2, 1 + index % 2), (3, 1)] for index, case in enumerate(CASES) if case != "no conv"}


@pytest.mark.parametrize(
    ("case", "layouts"), [*JOBS.items(), *(pytest.param(*job, marks=full) for job in FURTHER.items())]
)
@pytest.mark.timeout(600)
def test_hybrid_replicas_agree_with_one_rank(launch, tmp_path, case, layouts):
    shape, text = smooth(case)
    path = noise(tmp_path / "noise.npz", shape, BATCH // 8)
    alone = hybrid(launch, path, text, 1, 1)
    for ranks, replicas in layouts:
        same(alone, hybrid(launch, path, text, ranks, replicas, HYBRID))


WAYS = ["cluster.transport=send", "worker.in_flight=1", "worker.threads=2", "kernels.engine=generated"]


@full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("setting", WAYS)
def test_hybrid_replicas_agree_with_every_transport_and_engine(launch, tmp_path, setting):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape, BATCH // 8)
    same(hybrid(launch, path, text, 1, 1), hybrid(launch, path, text, 2, 1, HYBRID, setting))


@pytest.mark.timeout(300)
def test_a_run_resumes_with_another_scheme_and_other_ranks(launch, tmp_path):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape, BATCH // 8)
    constant = "optimizer.schedule=constant"
    alone = hybrid(launch, path, text, 1, 1, constant)
    half, _ = hybrid(launch, path, text, 2, 1, constant, HYBRID, f"train.epochs={STEPS // 2}")
    more = constant, f"train.batch={BATCH}"
    third = launch(
        5,
        "train",
        "--run",
        half.run,
        "--resume",
        *settings(path, text, 3, *more, HYBRID, f"train.epochs={STEPS * 3 // 4}"),
    )
    assert third.returncode == 0, third.said()
    resumed = launch(4, "train", "--run", half.run, "--resume", *settings(path, text, 2, *more, "layout.scheme=strips"))
    same(alone, result(resumed))


@pytest.mark.timeout(300)
def test_asynchronous_hybrid_replicas_finish_and_report_every_image(launch, tmp_path):
    shape, text = CASES["odd width"]
    path = noise(tmp_path / "noise.npz", shape, 200)
    for staleness in ("inf", "2"):
        more = f"consistency.staleness={staleness}", "train.epochs=2", "train.batch=64", HYBRID
        job, _ = trained(launch, path, text, 2, 2, *more)
        assert job.summary["status"] == "done" and job.summary["images"] == 2 * 200 * 8
        assert job.summary["pushes"]["sent"] == job.summary["pushes"]["acknowledged"]
        assert losses(job)


@full
@pytest.mark.skipif(all(mpi.name != "openmpi" for mpi in available()), reason="only Open MPI survives a dead rank")
@pytest.mark.parametrize("mpi", ["openmpi"], indirect=True)
def test_a_rank_that_is_lost_ends_its_replica_only(launch, mpi):
    more = ["layout.partitions=2", HYBRID, "train.batch=64", "optimizer.learning_rate=0.02"]
    summary = survive(launch, "kill rank=6 at=compute step=20", ranks=9, more=more)
    assert len(summary["recoveries"]) == 1 and summary["ranks"]["replicas"] == 1
