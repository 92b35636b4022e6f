"""Learning-rate schedules."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from launch import given as given_keys

from adam_mpi.checkpoint.resume import merge_positions
from adam_mpi.config import Optimizer, load
from adam_mpi.optimizer.schedules import SCHEDULES, Plateau, Progress, learning_rate
from adam_mpi.runtime.recovery import _recovered_position
from adam_mpi.runtime.role_setup import initial_position
from adam_mpi.server.progress import ServerProgress
from adam_mpi.sharding.training_state import Position, batch_id


def rates(schedule, images, total=900, warmup=0.0, batch=1, epoch=0, **fields):
    optimizer = Optimizer(learning_rate=0.5, schedule=schedule, warmup=warmup, **fields)
    return [learning_rate(optimizer, Progress(at, total, batch=batch, epoch=epoch)) for at in images]


def test_constant_stays():
    assert rates("constant", [0, 450, 900, 2000]) == [0.5] * 4


def test_step_falls_after_each_third():
    assert rates("step", [0, 299, 300, 599, 600, 899]) == pytest.approx([0.5, 0.5, 0.15, 0.15, 0.045, 0.045])


def test_milestones_are_epochs_or_steps():
    fields = {"milestones": [1, 2.5], "schedule_factor": 0.1, "batch": 30, "epoch": 300}
    assert rates("step", [0, 299, 300, 749, 750, 899], **fields) == pytest.approx([0.5, 0.5, *[0.05] * 2, *[0.005] * 2])
    by_steps = rates("step", [0, 29, 30, 74, 75, 899], schedule_unit="steps", **fields)
    assert by_steps == pytest.approx([0.5, 0.5, 0.05, 0.05, 0.005, 0.005])


def test_a_line_a_power_and_half_a_cosine_end_at_the_final_rate():
    at = [0, 225, 450, 900, 1000]
    assert rates("linear", at, final_rate=0.1) == pytest.approx([0.5, 0.4, 0.3, 0.1, 0.1])
    assert rates("polynomial", at, final_rate=0.1, power=2.0) == pytest.approx([0.5, 0.325, 0.2, 0.1, 0.1])
    half = 0.1 + 0.4 * (1 + np.cos(np.pi / 4)) / 2
    assert rates("cosine", at, final_rate=0.1) == pytest.approx([0.5, half, 0.3, 0.1, 0.1])
    assert rates("polynomial", at) == rates("linear", at)


def test_a_schedule_may_be_over_before_the_training():
    assert rates("linear", [0, 150, 300, 900], schedule_length=1, epoch=300) == pytest.approx([0.5, 0.25, 0, 0])
    steps = rates("linear", [0, 15, 30, 900], schedule_length=10, schedule_unit="steps", batch=3, epoch=300)
    assert steps == pytest.approx([0.5, 0.25, 0, 0])


def test_one_cycle_rises_from_a_25th_and_falls_to_the_final_rate():
    found = rates("one_cycle", range(0, 900, 9), batch=9, final_rate=0.001)
    highest = int(np.argmax(found))
    assert found[0] == pytest.approx(0.02) and found[-1] == pytest.approx(0.001)
    assert found[highest] == pytest.approx(0.5) and highest == 29
    assert np.all(np.diff(found[: highest + 1]) > 0) and np.all(np.diff(found[highest:]) < 0)


STEPS = 60


def of_torch(make, losses=()):
    """Return the rates of a scheduler of PyTorch that `make` returns for an optimizer, one per step."""
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5)
    schedule = make(torch.optim.lr_scheduler, optimizer)
    found = []
    for loss in losses or [None] * STEPS:
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step() if loss is None else schedule.step(loss)
    return found


@pytest.mark.parametrize(
    ("schedule", "fields", "make"),
    [
        ("cosine", {"final_rate": 0.01}, lambda s, o: s.CosineAnnealingLR(o, STEPS, eta_min=0.01)),
        ("linear", {"final_rate": 0.1}, lambda s, o: s.LinearLR(o, 1.0, 0.2, STEPS)),
        ("polynomial", {"power": 1.7}, lambda s, o: s.PolynomialLR(o, STEPS, power=1.7)),
        (
            "step",
            {"milestones": [7, 30], "schedule_unit": "steps", "schedule_factor": 0.2},
            lambda s, o: s.MultiStepLR(o, [7, 30], gamma=0.2),
        ),
        ("one_cycle", {"final_rate": 0.002}, lambda s, o: s.OneCycleLR(o, 0.5, STEPS, final_div_factor=10)),
        ("constant", {}, lambda s, o: s.ConstantLR(o, 1.0)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_schedule_is_that_of_pytorch(schedule, fields, make):
    ours = rates(schedule, range(0, 8 * STEPS, 8), total=8 * STEPS, batch=8, epoch=240, **fields)
    assert ours == pytest.approx(of_torch(make), rel=1e-6)


LOSSES = [1.0, 0.5, 0.6, 0.5, 0.49999, 0.4, 0.45, 0.41, 0.43, 0.5, 0.39, *[0.39] * 6]


def plateau(losses, factor=0.1, patience=2):
    """Return the scale before each epoch and after the last one."""
    optimizer = Optimizer(schedule="plateau", schedule_factor=factor, schedule_patience=patience)
    state = Plateau()
    scales = [state.scale]
    for loss in losses:
        state = Plateau(**json.loads(json.dumps(state.after(loss, optimizer).to_json())))
        scales.append(state.scale)
    return scales


def test_a_plateau_reduces_the_rate_after_too_many_epochs_without_a_better_loss():
    assert plateau([1.0, 0.9, 0.9, 0.95, 0.9, 0.9]) == pytest.approx([1, 1, 1, 1, 1, 0.1, 0.1])
    # NaN is no better loss.
    assert plateau([1.0, np.nan, np.nan], patience=1) == pytest.approx([1, 1, 1, 0.1])


def test_a_plateau_is_that_of_pytorch():
    found = of_torch(lambda s, o: s.ReduceLROnPlateau(o, factor=0.1, patience=2), LOSSES)
    assert [0.5 * scale for scale in plateau(LOSSES)[:-1]] == pytest.approx(found)


def test_cosine_goes_from_the_rate_to_zero():
    assert rates("cosine", [0, 300, 450, 900, 1000]) == pytest.approx([0.5, 0.375, 0.25, 0, 0])


def test_warmup_rises_linearly_and_then_has_no_effect():
    warmed = rates("constant", [0, 50, 89, 90, 91], warmup=0.1)
    assert warmed == pytest.approx([0.5 / 90, 0.5 * 51 / 90, 0.5, 0.5, 0.5])
    assert rates("cosine", [450], warmup=0.1) == rates("cosine", [450])


@given(st.sampled_from(sorted(SCHEDULES)), st.integers(0, 10**9), st.integers(0, 10**9), st.floats(0, 0.9))
def test_a_rate_is_never_negative_nor_above_the_first(schedule, images, total, warmup):
    assert 0 <= rates(schedule, [images], total, warmup)[0] <= 0.5


def trained(batches, images=8, epochs=3, between=lambda position: position):
    """Return the rates in epochs of `batches` batches of `images` images, where 80 images in batches of 8 were due.

    `between` is called with the position after each batch, and returns the one that training continues from.
    """
    settings = ["train.batch=8", f"train.epochs={epochs}", "optimizer.learning_rate=0.5", "optimizer.schedule=cosine"]
    progress = ServerProgress(load(None, settings), Position(12), 80)
    rates = []
    for epoch in range(1, epochs + 1):
        for number in range(batches):
            progress.position.add(np.array([batch_id(epoch, number)]))
            progress.position.images += images
            progress.position = between(progress.position)
            rates.append(progress.rate)
    return rates


def test_a_schedule_ends_with_training_although_images_are_left_out():
    assert trained(10)[-1] == pytest.approx(0)
    # Bad images: each batch lacks some.
    assert trained(10, images=5) == trained(10)
    # Epochs that end early: the first does not know it yet, the others are taken to be as long.
    assert trained(8)[-1] == pytest.approx(0)
    assert trained(8)[8:16] == pytest.approx(rates("cosine", [80 + 10 * n for n in range(1, 9)], 240))
    assert trained(8, epochs=1)[-1] == pytest.approx(rates("cosine", [64], 80)[0])


def resumed(position):
    """Return the position after a store of two servers was written and read."""
    known = merge_positions([Position.unpack(position.pack()) for _ in range(2)])
    job = SimpleNamespace(config=load(None, ["train.batch=8"]), replicas=2, resume=SimpleNamespace(position=known))
    job.description = SimpleNamespace(train=80)
    return initial_position(job)


def recovered(position):
    """Return the position after the loss of a rank."""
    return _recovered_position([{0: position}, {0: Position(12)}], version=None, begun=position.epoch)


@pytest.mark.parametrize("between", [resumed, recovered])
def test_a_schedule_ends_with_training_although_it_is_interrupted_in_epochs_that_end_early(between):
    assert trained(8, between=between) == trained(8)


def test_an_epoch_that_only_workers_have_begun_completes_the_one_before():
    position = Position(12, epoch=1)
    position.batches[:8] = True
    begun = _recovered_position([{0: position}], version=None, begun=2)
    assert (begun.epoch, begun.lasted, begun.count) == (2, 8, 0)


def test_positions_of_the_first_files_of_format_4_are_read():
    """They end with the bits of the batches."""
    position = Position(12, 3, 200, 40)
    position.lasted = 8
    short = Position.unpack(position.pack()[:-8])
    assert short.agrees(position) and short.lasted == 0


def test_every_image_counts_once_in_order():
    """This is the rate of synchronous training."""
    position = Position(13)
    batch = 16
    images = 200
    for epoch in (1, 2):
        for number in range(13):
            before = (epoch - 1) * images + number * batch
            assert position.images_passed(batch, images) == pytest.approx(before, abs=1e-9)
            position = position.after(np.array([batch_id(epoch, number)]), min(batch, images - number * batch))


@pytest.mark.slow
def test_a_plateau_lowers_the_rate_of_a_job_and_of_the_job_that_resumes_it(launch):
    """Weights that do not change have no better validation loss after the first epoch."""
    settings = ["data.images=640", "optimizer.learning_rate=1e-12", "optimizer.schedule=plateau", "train.test=false"]
    patience = ["optimizer.schedule_patience=0", "optimizer.schedule_factor=0.5", "train.epochs=3"]
    job = launch(3, "train", *given_keys(*settings, *patience))
    assert job.returncode == 0, job.said()
    rates = {line["epoch"]: line["rate"] for line in job.metrics() if line["part"] == "train" and line["done"]}
    assert rates == pytest.approx({1: 1e-12, 2: 1e-12, 3: 0.5e-12})
    again = launch(4, "train", "--run", job.run, "--resume", *given_keys("train.epochs=4"))
    assert again.returncode == 0, again.said()
    assert [line["rate"] for line in again.metrics() if line["part"] == "train"][-1] == pytest.approx(0.25e-12)
