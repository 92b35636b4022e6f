"""A run killed at any moment resumes: with clocks bit for bit, without them with no more lost than promised."""

import json
import os
import random
import re
import shutil
import signal
import time
from dataclasses import replace

import h5py
import numpy as np
import pytest
from launch import Job, available, given, start
from mpi4py import MPI

from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import resume as resume_points
from adam_mpi.checkpoint import run_directory, stores
from adam_mpi.config import load
from adam_mpi.runtime import run
from adam_mpi.runtime.agreement import epochs_done
from adam_mpi.sharding.training_state import Position

# Longer than its jobs may take, so that a job that hangs is ended by its own limit, which names the rank.
pytestmark = pytest.mark.timeout(430)
MODEL = 'model.layers=[{kind="dense",units=64},"relu",{kind="dense",units=4}]'
SMALL = [MODEL, "server.shard=512", "worker.threads=1", "optimizer.momentum=0.5", "observe.interval=0.1"]


def test_a_run_that_has_all_its_epochs_is_left_as_it_is(tmp_path, capsys):
    """Resumed once more it would train nothing, and write that over its results."""
    (tmp_path / "config.toml").write_text("train.epochs = 3")
    (tmp_path / "summary.json").write_text('{"epochs": 3}')
    assert epochs_done(tmp_path / "config.toml", (), str(tmp_path)) == 0
    (tmp_path / "DONE").touch()
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "DONE").touch()
    assert epochs_done(tmp_path / "config.toml", (), str(tmp_path / "empty")) == 0
    for other in ("train.epochs=4", "optimizer.learning_rate=0.5"):
        assert epochs_done(tmp_path / "config.toml", (other,), str(tmp_path)) == 0
    assert run.train_command(None, (), str(tmp_path), resume=True, minutes=1.0) == 0
    assert "is done: 3 epochs; for more: --set train.epochs=4 or above" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["DONE", "config.toml", "empty", "summary.json"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """Four classes of noisy 8x8 images in a file, and a small network for them."""
    draw = np.random.default_rng(0)
    centers, labels = draw.integers(0, 256, (4, 8, 8)), np.arange(2000) % 4
    images = np.clip(centers[labels] + draw.normal(0, 90, (2000, 8, 8)), 0, 255).astype(np.uint8)
    path = tmp_path_factory.mktemp("data") / "noisy.npz"
    np.savez(
        path,
        train_images=images[:1600],
        train_labels=labels[:1600],
        test_images=images[1600:],
        test_labels=labels[1600:],
    )
    return given(*SMALL, f"data.set={path}", "kernels.engine=reference")


def weights(run):
    found = {}
    with h5py.File(run / "weights.h5") as file:
        file.visititems(lambda name, item: found.update({name: item[()]}) if "/" in name else None)
    return found


def equal(run, expected):
    return all(array.tobytes() == expected[name].tobytes() for name, array in weights(run).items())


def inside_an_epoch(job):
    """The names of snapshots that were taken inside an epoch."""
    return [path.name for path in job.run.glob("snapshots/epoch-*-batch-*")]


def kill(job: Job):
    """The whole job at once, as a node that goes down."""
    ranks = job.ranks()
    # None may see another one die first and continue without it.
    for process in ranks:
        process.suspend()
    for process in ranks:
        process.kill()
    job.process.kill()
    job.process.wait(20)
    assert job.left_over(20) == []


def done(job: Job):
    job.wait(150)
    assert job.returncode == 0 and job.summary["status"] == "done" and (job.run / "DONE").exists(), job.said()
    return job


ADAM = ("optimizer.kind=adam", "optimizer.momentum=0", "optimizer.learning_rate=0.002", "optimizer.epsilon=1e-3")


@pytest.mark.parametrize(
    ("codec", "rule"),
    [
        ("none", (*ADAM, "optimizer.clip_norm=0.5")),
        pytest.param("none", (), marks=pytest.mark.full),
        pytest.param("topk", (), marks=pytest.mark.full),
    ],
)
def test_a_synchronous_run_cut_twice_ends_with_the_same_bits(codec, rule, start_job, settings, tmp_path):
    layout = given("layout.data=2", "layout.servers=2", "consistency.staleness=0", "train.epochs=2")
    layout += given(f"push.codec={codec}", *rule)
    expected = weights(done(start_job(6, "train", *settings, *layout)).run)

    # Slow enough to be caught inside an epoch, with a snapshot every few clocks.
    slow = given("snapshot.minutes=0.001", 'inject.faults=["delay role=worker at=compute seconds=0.05"]')
    first = start_job(6, "train", *settings, *layout, *slow)
    kill(first.until(lambda: inside_an_epoch(first), "a snapshot inside an epoch"))
    shutil.copytree(first.run, tmp_path / "elsewhere")

    # The configuration is that of the run; a file stops it inside an epoch, in order.
    second = start_job(6, "train", "--run", first.run, "--resume")
    seen = len(second.metrics())
    second.until(lambda: any(line["images"] for line in second.metrics()[seen:]), "its first images")
    (second.run / "STOP").touch()
    second.wait(60)
    assert second.returncode == 0 and second.summary["status"] == "stopped", second.said()
    assert (second.run / "STOPPED").read_text() == "the file STOP\n" and not (second.run / "DONE").exists()
    fast = given("inject.faults=[]", "snapshot.minutes=0")
    third = done(start_job(6, "train", "--run", first.run, "--resume", *fast))
    assert "resuming from snapshot epoch-" in third.stdout and equal(third.run, expected), third.said()

    # On another layout the sums have another order; codecs leave out something else then.
    if codec != "none":
        return
    other = given("layout.data=1", "layout.servers=1")
    done(start_job(3, "train", "--run", tmp_path / "elsewhere", "--resume", *fast, *other))
    for name, array in weights(tmp_path / "elsewhere").items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-5, atol=1e-5, err_msg=name)


def batches(job):
    return sum(line["images"] for line in job.metrics() if line["part"] == "train")


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(10, marks=pytest.mark.full)])
def test_a_run_killed_at_random_moments_reaches_the_same_accuracy(kills, settings, tmp_path):
    """Each time on another number of ranks, and on another MPI where there are two."""
    draw = random.Random(kills)
    common = ["train", *settings, "--run", tmp_path / "run", "--resume", *given("train.epochs=6", "store.interval=0.3")]
    # All of it would take 20 s or more: no job is done before it is killed.
    slow = given('inject.faults=["delay role=worker at=compute seconds=0.5"]')
    notes = []
    for turn in range(kills):
        mpi, ranks = available()[turn % len(available())], 3 + turn % 4
        job = start(mpi, ranks, *common, *slow, folder=tmp_path / f"job-{turn}")
        seen = len(job.metrics())
        job.until(lambda job=job, seen=seen: len(job.metrics()) > seen, "its first images")
        time.sleep(draw.uniform(0.0, 1.5))  # a random moment
        kill(job)
        notes += re.findall("resuming from (store|snapshot)", job.stdout)
    job = start(available()[0], 5, *common, *given("inject.faults=[]"), folder=tmp_path / "last")
    done(job)
    assert len(notes) >= kills - 1 and job.summary["test_accuracy"] > 0.97, job.said()


def stored(run, folder=None):
    """What a run would resume from, with its shards."""
    seen = stores.find_stores(MPI.COMM_SELF, folder or run / "store", run_directory.load_or_create_identity(run), True)
    found, passed_over = resume_points.find_resume_point(load(run / "config.toml"), run, seen)
    assert found.kind == "store" and found.midway and passed_over == []
    return found, [piece for file in seen.attempt.files.values() for piece in file.written]


def test_without_clocks_the_store_keeps_its_promise_and_says_what_is_lost(start_job, settings):
    fault = 'inject.faults=["delay role=worker at=compute seconds=0.15"]'
    slow = given("snapshot.minutes=0", "store.interval=1", "layout.servers=2", fault)
    first, seen = start_job(5, "train", *settings, *slow, *given("train.epochs=1")), []

    def images():
        seen.append((time.monotonic(), max((line["images"] for line in first.metrics()), default=0)))
        return seen[-1][1]

    first.until(lambda: images() > 1100, "two thirds of its images")
    end = time.monotonic()
    kill(first)
    found, pieces = stored(first.run)
    # What was reported as acknowledged an interval before the kill is in every shard, or a warning said how far behind.
    promised = max(images for at, images in seen if at < end - 1)
    least = min(piece.images for piece in pieces)
    assert least >= promised > 0 or "s behind" in first.stderr, (least, promised, found.note)
    assert found.images + 32 * found.lost_pushes >= seen[-1][1]
    second = start_job(5, "train", "--run", first.run, "--resume", *given("inject.faults=[]"))
    done(second)
    lost = r"resuming from store .* up to (\d+) acknowledged pushes .* are lost(, none older than [\d.]+ s|$)"
    reported = re.search(lost, second.stdout, re.M)
    assert reported and int(reported[1]) == found.lost_pushes, second.said()
    trained = [line["images"] for line in second.metrics() if line["done"] and line["part"] == "train"]
    assert trained[-1] <= 1600 - found.images + 32 * 20
    assert second.summary["test_accuracy"] > 0.9
    assert [path.name for path in (first.run / "store").iterdir()] == ["0002"]


def test_stores_on_disks_of_single_nodes_are_read_where_they_lie(start_job, settings, tmp_path):
    """Each rank has a disk of its own; the server is on another one each time."""
    (tmp_path / "disks").mkdir()
    disk = f'export DISK={tmp_path}/disks/$((${{OMPI_COMM_WORLD_RANK:-$PMI_RANK}})); exec "$@"'
    options = {"options": ["bash", "-c", disk, "-"]}
    slow = 'inject.faults=["delay role=worker at=compute seconds=0.05"]'
    where = given("store.dir=$DISK", "snapshot.minutes=0", "store.interval=0.2", "layout.servers=2", "train.epochs=1")
    first = start_job(5, "train", *settings, *where, *given(slow), **options)
    first.until(lambda: any(line["images"] > 400 for line in first.metrics()), "a quarter of its images")
    kill(first)
    files = sorted(path.relative_to(tmp_path) for path in tmp_path.glob("disks/*/run-*/0001/server-*.h5"))
    assert len({file.parts[1] for file in files}) == 2, files
    # One of them alone is not whole.
    place = (tmp_path / files[0]).parent.parent
    alone = stores.find_stores(MPI.COMM_SELF, place, run_directory.load_or_create_identity(first.run), True)
    assert alone.attempt is None and len(alone.trouble) == 1 and alone.last == 1
    fast = given("inject.faults=[]", "layout.servers=1", "layout.data=2")
    second = done(start_job(4, "train", "--run", first.run, "--resume", *fast, **options))
    assert "resuming from store" in second.stdout and "passed over" not in second.stderr, second.said()
    trained = [line["images"] for line in second.metrics() if line["done"] and line["part"] == "train"]
    assert trained[-1] < 1600 and second.summary["test_accuracy"] > 0.9


@pytest.mark.parametrize("required", [False, True])
def test_a_store_that_cannot_be_written_stops_only_a_job_that_requires_it(required, launch, settings, tmp_path):
    (tmp_path / "file").touch()
    where = given(f"store.dir={tmp_path / 'file'}", f"store.required={str(required).lower()}", "train.epochs=1")
    job = launch(1, "train", *settings, *where)
    assert job.returncode == (2 if required else 0) and (job.run / "DONE").exists() != required, job.said()
    end = "store.required = true" if required else "training continues"
    assert re.search(rf"adam_mpi: .*store {tmp_path / 'file'}\S+: .*{end}", job.stderr), job.said()


def test_usr1_takes_a_snapshot_and_training_continues(start_job, settings):
    # An epoch of several seconds: the snapshots of epoch ends do not come in between.
    fault = 'inject.faults=["delay role=worker at=compute seconds=0.1"]'
    slow = given("snapshot.minutes=0", "train.epochs=1000000", fault)
    job = start_job(2, "train", *settings, *slow, *given("consistency.staleness=1"))
    job.until(lambda: any(line["images"] for line in job.metrics()), "its first images")
    os.kill(job.process.pid, signal.SIGUSR1)
    job.until(lambda: inside_an_epoch(job), "the snapshot")
    seen = len(job.metrics())
    job.until(lambda: len(job.metrics()) > seen + 3, "more progress")


def test_max_minutes_stops_and_the_same_command_resumes(launch, settings):
    command = ["train", *settings, "--resume", "--run", "run", *given("train.epochs=1000000")]
    first = launch(3, *command, "--max-minutes", "0.05")
    assert first.returncode == 0 and first.summary["status"] == "stopped", first.said()
    assert first.summary["stopped_by"] == "--max-minutes"
    [name] = [path.name for path in first.run.glob("snapshots/*") if path.name == max(first.summary["snapshots"])]
    shutil.copytree(first.run, first.folder.parent / "job-1" / "run")
    again = launch(3, *command, "--max-minutes", "0.05")
    assert f"resuming from snapshot {name}" in again.stdout and again.summary["status"] == "stopped", again.said()


def test_a_damaged_snapshot_is_named_and_the_one_before_is_taken(start_job, settings):
    # What the codec has left out so far is in a snapshot too: without it the bits would not be the same.
    codec = given("push.codec=onebit")
    first = done(start_job(1, "train", *settings, *codec, *given("train.epochs=3", "consistency.staleness=0")))
    # Besides the two latest, the last one that is known to be good is kept. Where the disk is slow, the one before is
    # taken when the third epoch has begun.
    kept = sorted(path.name for path in (first.run / "snapshots").iterdir())[-2:]
    assert kept[0].startswith("epoch-0002") and kept[1] == "epoch-0003"
    expected = weights(first.run)
    with h5py.File(first.run / "snapshots" / "epoch-0003" / "server-00000.h5", "r+") as file:
        file["weights"][100] += 1
    # As if it had been cut at the very end.
    (first.run / "DONE").unlink()
    again = done(start_job(1, "train", "--run", first.run, "--resume"))
    assert re.search(r"passed over: .*server-00000.h5: shard \d+ is damaged", again.stderr)
    assert f"resuming from snapshot {kept[0]}" in again.stdout and equal(again.run, expected)
    (first.run / "DONE").unlink()
    last = done(start_job(1, "train", "--run", first.run, "--resume"))
    assert last.summary["test_accuracy"] == first.summary["test_accuracy"] and equal(last.run, expected)


def test_another_model_is_refused_in_one_line(start_job, settings):
    first = done(start_job(3, "train", *settings, *given("train.epochs=0")))
    other = given('model.layers=[{kind="dense",units=4}]')
    refused = start_job(3, "train", *other, "--run", first.run, "--resume").wait()
    lines = re.findall(r"^adam_mpi: .*", refused.stderr, re.M)
    assert refused.returncode == 2 and len(lines) == 1 and "Traceback" not in refused.stderr, refused.said()
    assert re.search("holds 4420 parameters, this model has 260; resume with the run's config", lines[0])


def resume(config, epochs, epoch, replicas=2):
    position = Position(10, epoch)
    order = resume_points.order_settings(config)
    return resume_points.Resume(
        kind="snapshot",
        path="somewhere",
        epochs=epochs,
        position=position,
        best=(-1.0, 0),
        parameters=100,
        replicas=replicas,
        order=order,
        note="",
    )


def test_another_order_of_images_inside_an_epoch_is_refused():
    config = load(None, ["train.batch=16"])
    inside, at_end = resume(config, 1, 2), resume(config, 2, 2)
    assert resume_points.check_resume(inside, config, 5, 100) == ""
    config.train.batch = 32
    with pytest.raises(UserError, match="train.batch = 32: the run is inside an epoch begun with 16; resume with that"):
        resume_points.check_resume(inside, config, 2, 100)
    assert resume_points.check_resume(at_end, config, 2, 100) == ""


def test_another_rule_begins_without_the_state_that_is_not_there_and_says_so():
    found = replace(resume(load(None), 2, 2), parts=("weights", "mean_gradient", "mean_square"))
    for kind in ("adam", "adamw", "rmsprop"):
        assert resume_points.check_resume(found, load(None, [f"optimizer.kind={kind}"]), 2, 100) == ""
    note = resume_points.check_resume(found, load(None, ["optimizer.momentum=0.5"]), 2, 100)
    assert note == "optimizer: momentum begins without velocity, which the snapshot does not have"


def test_skewed_shares_need_the_replicas_they_were_drawn_for():
    config = load(None, ["data.skew=by_class"])
    assert resume_points.check_resume(resume(config, 1, 2), config, 2, 100) == ""
    with pytest.raises(UserError, match="shares were drawn for 2 replicas, now 3; resume with 2"):
        resume_points.check_resume(resume(config, 1, 2), config, 3, 100)
    assert "drawn again" in resume_points.check_resume(resume(config, 2, 2), config, 3, 100)


def test_a_second_job_is_refused_and_one_that_takes_over_ends_the_first(start_job, settings):
    slow = given("train.epochs=1000000", 'inject.faults=["delay role=worker at=compute seconds=0.05"]')
    first = start_job(2, "train", *settings, *slow)
    first.until(lambda: any(line["images"] for line in first.metrics()), "its first images")
    before = (first.run / "config.toml").read_text()
    second = start_job(1, "train", *settings, "--run", first.run, "--resume").wait()
    lines = re.findall(r"^adam_mpi: .*", second.stderr, re.M)
    assert second.returncode == 2 and len(lines) == 1 and re.search(r"in use .* process \d+ on", lines[0]), (
        second.said()
    )
    assert (first.run / "config.toml").read_text() == before and first.process.poll() is None
    some = given("train.epochs=0", "inject.faults=[]")
    third = start_job(2, "train", *settings, *some, "--run", first.run, "--resume", "--take-over")
    first.wait(60)
    taken = r"^adam_mpi: run directory \S+ has been taken by process \d+ .*; this job ends$"
    assert re.search(taken, first.stderr, re.M), first.said()
    done(third)
    assert "taken over from process" in third.stderr and not (third.run / "log" / "failure.txt").exists()
    assert [json.loads(path.read_text())["released"] for path in (first.run / "owner").iterdir()] == [True]


def test_a_process_of_several_that_do_not_know_each_other_is_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "4")
    monkeypatch.setenv("SLURM_PROCID", "0")
    assert run.train_command(None, (), str(tmp_path / "run"), resume=True, minutes=1.0) == 2
    assert "4 processes were started by srun" in capsys.readouterr().err and not (tmp_path / "run").exists()
    monkeypatch.setenv("SLURM_PROCID", "2")
    assert run.train_command(None, (), str(tmp_path / "run"), resume=True, minutes=1.0) == 2
    assert capsys.readouterr().err == ""


def test_the_position_of_a_store_is_what_all_servers_have():
    first, second, ahead = Position(6, 2, 90), Position(6, 2, 70), Position(6, 3, 120)
    first.batches[:4] = True
    second.batches[2:5] = True
    ahead.batches[:] = True
    both_have = resume_points.merge_positions([first, ahead, second])
    assert (both_have.epoch, both_have.images) == (2, 70)
    assert np.flatnonzero(both_have.batches).tolist() == [2, 3]


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ((), "25 acknowledged pushes (800 images)"),
        (("consistency.staleness=0", "train.batch=64"), "13 acknowledged clocks (800 images)"),
    ],
)
def test_a_restart_from_a_snapshot_says_what_it_cost(tmp_path, keys, text):
    (tmp_path / "metrics.jsonl").write_text('{"images_trained": 3200}\n{"images_trained": 4000}\n')
    config = load(None, keys)
    found = replace(resume(config, 1, 2), position=Position(0, 2, 3200))
    assert text in resume_points.describe_lost_work(found, tmp_path, config)
    assert "0 acknowledged" in resume_points.describe_lost_work(found, tmp_path / "new", config)
