"""What the guard of a job does about divergence, and how the schedule plateau changes the rate of all servers."""

import math
import types

import pytest

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import divergences
from adam_mpi.checkpoint.divergences import Divergences
from adam_mpi.cluster.control_messages import SetRateScale
from adam_mpi.config import Optimizer, load
from adam_mpi.monitor.divergence import LossTotals
from adam_mpi.optimizer.schedules import Plateau
from adam_mpi.runtime import guard as guards
from adam_mpi.runtime.guard import MOST_BACK_OFFS, Guard
from adam_mpi.runtime.job import JobRecord
from adam_mpi.runtime.plateau_control import PlateauControl
from adam_mpi.sharding.fields import CLASSES
from adam_mpi.sharding.training_state import Phase

TRAIN = Phase(3, "train", 2)


class Report:
    """The parts of a JobReport that a guard uses; `said` has what it has shown."""

    def __init__(self, folder, on_divergence="back_off", number=0, good=("epoch-0001",), resume=None):
        self.said = []
        self.divergences = []
        self.totals = LossTotals(0, 0, 0)
        config = load(None, [f"train.on_divergence={on_divergence}", "optimizer.learning_rate=0.08"])
        layout = types.SimpleNamespace(data=[0])
        self.world = types.SimpleNamespace(config=config, layout=layout)
        self.job = types.SimpleNamespace(
            directory=folder,
            description=types.SimpleNamespace(classes=10, target=types.SimpleNamespace(kind=CLASSES)),
            resume=resume,
            diverged=Divergences(number=number, rate_scale=0.5**number),
        )
        self.statistics = types.SimpleNamespace(loss_totals=lambda phase, ranks: self.totals, layers=dict)
        self.snapshots = types.SimpleNamespace(good=list(good), times={}, confirm=lambda until: None)
        self.record = JobRecord.start(None)
        self.progress = types.SimpleNamespace(name=lambda phase: "epoch 2/4 train", say=self.said.append)

    def end_diverged(self, text):
        raise UserError(text)


@pytest.fixture
def clock(monkeypatch):
    now = types.SimpleNamespace(seconds=1000.0)
    monkeypatch.setattr(guards.time, "time", lambda: now.seconds)
    return now


def feed(guard, report, clock, losses):
    """Let data ranks report `losses`, one mean loss in half a second; return how many were judged before an order."""
    for index, loss in enumerate(losses):
        clock.seconds += 0.5
        before = report.totals
        finite = math.isfinite(loss)
        report.totals = LossTotals(
            images=before.images + 500,
            loss=before.loss + (500 * loss if finite else 0.0),
            not_finite=before.not_finite + (0 if finite else 500),
        )
        guard.look(TRAIN)
        if guard.ordered:
            return index
    return None


GOOD = [2.3, 1.5, 0.9, *[0.3] * 10]
BAD = [math.nan] * 10


def test_a_job_that_diverges_goes_back_to_its_good_snapshots(tmp_path, clock):
    report, orders = Report(tmp_path, good=["epoch-0001", "epoch-0002"], number=1), []
    guard = Guard(report, orders.append, continued=False)
    assert feed(guard, report, clock, GOOD) is None and not orders
    assert feed(guard, report, clock, BAD) == 1
    (order,) = orders
    assert (order.number, order.snapshots, order.learning_rate) == (2, ["epoch-0002", "epoch-0001"], 0.04)
    assert order.rate_scale == 0.25
    (said,) = report.said
    assert said.startswith("epoch 2/4 train: training has diverged after 7500 images: most losses have not been finite")
    assert said.endswith("all ranks go back to epoch-0002, with optimizer.learning_rate = 0.04")
    (record,) = report.divergences
    assert (record["back_to"], record["learning_rate"], record["images"]) == ("epoch-0002", 0.04, 7500)
    assert divergences.read(tmp_path).rate_scale == 0.25
    # The generation is over.
    assert feed(guard, report, clock, BAD) == 0 and len(orders) == 1


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        ({"on_divergence": "stop"}, 'set optimizer.learning_rate below 0.08, or train.on_divergence = "back_off"'),
        ({"number": MOST_BACK_OFFS}, "it has gone back 5 times; set optimizer.learning_rate below 0.08"),
        ({"good": [], "resume": "a store"}, "there is no good snapshot to go back to; set optimizer.learning_rate"),
    ],
    ids=["stop", "too often", "nothing to go to"],
)
def test_a_job_that_cannot_go_back_ends_by_name(tmp_path, clock, given, advice):
    report = Report(tmp_path, **given)
    guard = Guard(report, pytest.fail, continued=False)
    feed(guard, report, clock, GOOD)
    with pytest.raises(UserError, match="training has diverged after") as raised:
        feed(guard, report, clock, BAD)
    assert advice in str(raised.value) and report.divergences[0]["back_to"] == ""


def test_without_a_snapshot_it_goes_back_to_the_initial_weights(tmp_path, clock):
    report, orders = Report(tmp_path, good=[]), []
    guard = Guard(report, orders.append, continued=False)
    figures = {"images": 320, "images_not_finite": 320}
    guard.check_figures(Phase(4, "validation", 2), figures, done=True)
    assert orders[0].from_start and orders[0].snapshots == [] and "go back to the initial weights" in report.said[0]


def test_losses_from_before_a_generation_are_not_judged(tmp_path, clock):
    """The sums of data ranks continue, and those of lost ones are shared out."""
    report = Report(tmp_path)
    guard = Guard(report, pytest.fail, continued=True)
    report.totals = LossTotals(9000, math.inf, 0)
    assert feed(guard, report, clock, [0.3]) is None and guard.windows.before.images == 9500


def test_a_plateau_changes_the_rate_of_all_servers_before_the_next_phase():
    sent = []
    reports = [{"rank": 7, "rate_scale": 1.0}, {"rank": 8, "rate_scale": 1.0}, {"rank": 9, "rate_scale": 1.0}]
    places = [types.SimpleNamespace(member=member) for member in (6, 7, 8)]
    config = types.SimpleNamespace(optimizer=Optimizer(schedule="plateau", schedule_patience=0, schedule_factor=0.5))
    world = types.SimpleNamespace(layout=types.SimpleNamespace(servers=[1, 2], places=places), config=config)
    channel = types.SimpleNamespace(send=lambda message, to: sent.append((to, message)))
    statistics = types.SimpleNamespace(of_role=lambda role: reports)
    control = PlateauControl(world, channel, statistics, Plateau())
    control.validated(0.5)
    assert control.settled and not sent
    control.validated(0.6)
    assert sent == [(1, SetRateScale(0.5)), (2, SetRateScale(0.5))] and not control.settled
    reports[0]["rate_scale"] = 0.5
    assert not control.settled
    # Rank 9 is lost.
    reports[1]["rate_scale"] = 0.5
    assert control.settled
