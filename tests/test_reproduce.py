"""scripts/reproduce: the search never tests, seeds are kept and not run again, and the arithmetic of the studies."""

import json
import math
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from launch import ROOT, clean_environment

from adam_mpi import config
from adam_mpi.base.errors import UserError
from adam_mpi.checkpoint import model_file
from adam_mpi.config import LAYERS
from adam_mpi.model import parameters

FOLDER = ROOT / "scripts" / "reproductions"
for folder in (FOLDER, ROOT / "scripts" / "benches"):
    sys.path.append(str(folder))

import _first  # noqa: E402
import _frames  # noqa: E402
import _others  # noqa: E402
import _recipes  # noqa: E402
import _results  # noqa: E402
import _search  # noqa: E402
import _spread  # noqa: E402
import _training  # noqa: E402
import ddp  # noqa: E402
import figures  # noqa: E402
import results  # noqa: E402
import table1  # noqa: E402

SMALL = ["data.set=glyphs", "data.images=640", "kernels.engine=reference"]


@pytest.fixture
def reproduce(tmp_path):
    """`scripts/reproduce` in this environment, with results in a folder of its own."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()

    def run(*words):
        given = [word for setting in SMALL for word in ("--set", setting)]
        done = subprocess.run(
            [sys.executable, FOLDER, *words, *given, "-o", tmp_path / "results"],
            cwd=tmp_path,
            env=clean_environment() | {"TMPDIR": str(temporary)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_table1_from_the_search_to_the_page(reproduce, tmp_path):
    folder = tmp_path / "results" / "mnist"
    reproduce("table1", "search", "--only", "start", "--epochs", "1")
    log = json.loads((folder / "search.json").read_text())
    assert set(log) == {"async start", "sync start"}
    assert all(not entry["test_evaluated"] and len(entry["accuracies"]) == 1 for entry in log.values())
    assert _recipes.read(folder / "async.toml")["consistency"]["staleness"] == float("inf")
    said = reproduce("table1", "--seeds", "1", "--epochs", "1")
    assert "| Adam, paper | 99.63 |" in said and "needs two seeds" in said
    kept = {mode: json.loads((folder / f"{mode}-1.json").read_text()) for mode in ("async", "sync")}
    assert kept["async"]["delay"]["mean"] > 0 and kept["sync"]["delay"]["max"] == 0
    assert kept["async"]["ranks"]["replicas"] == 2 and 0 < kept["async"]["test_accuracy"] <= 1
    # Nothing is run again.
    before = sorted((tmp_path / "results" / "runs").iterdir())
    assert "async seed" not in reproduce("table1", "--seeds", "1", "--epochs", "1")
    assert sorted((tmp_path / "results" / "runs").iterdir()) == before
    assert "asynchronous, 2 replicas" in results.page(tmp_path / "results")


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["staleness", "codecs", "skew", "quorum", "sizes", "traffic"])
def test_a_figure_of_jobs(name, reproduce, tmp_path):
    reproduce("figures", name, "--epochs", "1", "--seeds", "1", "--minutes", "1.3")
    told = json.loads((tmp_path / "results" / "figures" / f"{name}.json").read_text())
    assert told["points"] and (tmp_path / "results" / "figures" / f"{name}.svg").stat().st_size > 1000


def test_what_is_changed_does_not_lie_among_the_real_results():
    options = SimpleNamespace(folder=_results.FOLDER, set=["train.epochs=1"])
    with pytest.raises(UserError, match="-o FOLDER"):
        _results.results(options, "mnist")


def test_a_recipe_that_is_not_committed_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_results, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b"]
    recipe = tmp_path / "async.toml"
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "first"], check=True)
    recipe.write_text("")
    with pytest.raises(UserError, match="commit it first"):
        _results.commit_of(recipe)
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "recipe"], check=True)
    assert len(_results.commit_of(recipe)) == 40
    recipe.write_text("changed = 1")
    with pytest.raises(UserError, match="commit it first"):
        _results.commit_of(recipe)


@pytest.mark.parametrize("data", _recipes.SETS)
def test_candidates_are_configurations_of_the_papers_network(data):
    found = _recipes.candidates(data)
    assert len(found) >= 4
    for recipe in found.values():
        layers = config.load(recipe).model.layers
        assert [layer for layer in layers if "dropout" not in str(layer)] == LAYERS


def test_a_candidate_changes_keys_and_leaves_the_others():
    base = {"optimizer": {"rate": 0.1, "momentum": 0.9}, "train": {"batch": 64}}
    changed = _recipes.merged(base, {"optimizer": {"rate": 0.2}, "push": {"images": 32}})
    assert changed == {"optimizer": {"rate": 0.2, "momentum": 0.9}, "train": {"batch": 64}, "push": {"images": 32}}
    assert base["optimizer"]["rate"] == 0.1


def test_a_bound_is_for_asynchronous_training_only():
    bounded = {"consistency": {"staleness": 2}}
    assert [_search.staleness(bounded, mode) for mode in ("async", "sync")] == ["2", "0"]
    assert [_search.staleness({}, mode) for mode in ("async", "sync")] == ["inf", "0"]


def test_the_choice_is_by_accuracy_and_then_by_loss():
    rows = [("async", "a", 0.99, 0.1), ("async", "b", 0.99, 0.05), ("async", "c", 0.98, 0.01), ("sync", "d", 1.0, 0.0)]
    log = {
        name: {"mode": mode, "candidate": name, "score": score, "validation_loss": loss}
        for mode, name, score, loss in rows
    }
    assert (_search.choose(log, "async"), _search.choose(log, "sync")) == ("b", "d")


def test_the_interval_of_a_difference():
    # Means 3 and 7, both variances 2.5: the error of the difference is 1, with 8 degrees of freedom t is 2.306.
    value, low, high = _spread.difference([1, 2, 3, 4, 5], [5, 6, 7, 8, 9])
    assert (value, low, high) == (-4, pytest.approx(-6.306, abs=1e-3), pytest.approx(-1.694, abs=1e-3))
    assert _spread.difference([1.0], [1.0, 2.0]) is None
    assert _spread.spread([0.99, 0.97], 1, 100) == "98.0 ± 1.4"


def test_one_seed_of_each_is_judged_by_the_held_out_images():
    # Variances 99 * 1 / 5000 each: the error of the difference is 0.199 %.
    assert _spread.chance(99.0, 99.0, 5000) == pytest.approx(1.96 * 0.199, abs=1e-3)
    assert "needs two seeds" in _spread.compared("one", "other", [99.0], [99.2])
    assert "cannot be told from zero" in _spread.compared("one", "other", [99.0], [99.2], images=5000)
    assert "is not zero" in _spread.compared("one", "other", [99.0], [99.2], images=500_000)


@pytest.mark.parametrize("settings", ddp.CANDIDATES["adam_mpi"], ids=str)
def test_what_ddp_is_compared_with_is_a_configuration(settings):
    loaded = config.load(ddp.recipe(settings))
    assert loaded.model.layers == LAYERS and loaded.train.target == ddp.TARGET and not loaded.train.test
    assert (loaded.optimizer.momentum == 0) == loaded.asynchronous, "momentum and delay multiply"


def _kept(folder, curves):
    """A search of DDP: the curve of each setting by seed."""
    kept = _results.Results(folder)
    for settings, tries in zip(ddp.CANDIDATES["ddp"], curves, strict=False):
        for seed, curve in zip(ddp.TRIES, tries, strict=False):
            reached = next((seconds for seconds, accuracy in curve if accuracy >= ddp.TARGET), None)
            told = {"settings": settings, "curve": curve, "seconds_to_target": reached}
            kept.keep(ddp._name({"side": "ddp", "seed": seed, "settings": settings}), told)
    return kept


def test_both_sides_are_searched_alike_and_judged_by_their_quickest_epoch(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "FINALISTS", 3)
    assert len(ddp.CANDIDATES["adam_mpi"]) == len(ddp.CANDIDATES["ddp"])
    assert not set(ddp.TRIES) & set(range(1, ddp.ROUNDS + 1)), "a round is no try of the search"
    two_epochs, three = [[9.0, 0.98], [12.0, 0.99]], [[4.0, 0.97], [8.0, 0.98], [12.0, 0.99]]
    kept = _kept(tmp_path, [[three], [two_epochs], [[[1.0, 0.9]]], [[[50.0, 0.99]]], [[[20.0, 0.99]]]])
    # Two epochs of 3 s before three of 4 s; what has not got there is no finalist.
    assert ddp.finalists(kept, "ddp") == [ddp.CANDIDATES["ddp"][number] for number in (1, 0, 4)]


def test_settings_that_get_there_by_luck_are_not_chosen(tmp_path, monkeypatch):
    monkeypatch.setattr(ddp, "FINALISTS", 3)
    quick, slow, never = [[5.0, 0.99]], [[8.0, 0.99]], [[5.0 * epoch, 0.98] for epoch in range(1, 9)]
    assert ddp.best(_kept(tmp_path, [[quick, never, quick], [slow] * 3, [slow]]), "ddp") == ddp.CANDIDATES["ddp"][1]
    with pytest.raises(UserError, match=r"2 settings of ddp reached 99\.0% in 8 epochs, of 3"):
        ddp.finalists(_kept(tmp_path / "few", [[quick], [slow], [never]]), "ddp")


@pytest.mark.parametrize("first", ["torch", "adam_mpi"])
def test_both_sides_begin_with_the_same_weights(first, tmp_path):
    pytest.importorskip("torch", reason="pip install torch==2.13.0")
    theirs = [values.numpy() for values in _first.module(first, 3).state_dict().values()]
    file = config.load(None, _first.settings(first, 3, config.load(), tmp_path)).model.weights
    tensors = parameters.tensors(_first.SHAPES)
    ours = model_file.read_model(Path(file), tensors) if file else parameters.initial(_first.SHAPES, 3)
    assert bool(file) == (first == "torch")
    assert np.array_equal(np.concatenate([values.ravel() for values in theirs]), ours)


SLEEPER = "import sys, time; print(flush=True); time.sleep(60)"
STARTER = f"import sys, _child; _child.run([sys.executable, '-c', {SLEEPER!r}])"


@pytest.mark.skipif(not shutil.which("setpriv"), reason="needs setpriv, of util-linux")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_job_ends_with_whoever_started_it(number):
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    with subprocess.Popen([sys.executable, "-c", STARTER], env=environment, stdout=subprocess.PIPE) as starter:
        starter.stdout.readline()
        starter.send_signal(number)
        # The end of what both of them write is there when both have ended.
        assert starter.communicate(timeout=30)[0] == b""


def test_a_run_whose_result_was_thrown_away_is_made_again(tmp_path, monkeypatch):
    started = []

    def start(self, path, *_):
        started.append(sorted(file.name for file in path.glob("*")))
        path.mkdir(parents=True, exist_ok=True)
        (path / ("DONE" if len(started) > 1 else "half")).touch()

    monkeypatch.setattr(_training.Training, "_start", start)

    def training():
        return _training.Training(tmp_path, _results.Clock(math.inf))

    assert training().run({}) is None and training().run({}) is not None
    assert started == [[], ["half"]], "what was cut goes on"
    again = training()
    assert again.run({}) is not None and again.run({}) is not None
    assert started == [[], ["half"], []], "once in a call, from the start"


def test_nobody_is_better_than_bayes_at_the_frames(tmp_path):
    spoken = _frames.speech()
    features, labels = spoken.draw(4000, 7)
    least = np.mean(spoken.best(features) != labels)
    centers = spoken.centers.mean(axis=1) @ spoken.mixing
    nearest = np.argmin(((features[:, None] - centers) ** 2).sum(axis=-1), axis=1)
    assert 0.02 < least < 0.4 and least < np.mean(nearest != labels)
    # On all features, without the shortcut through the hidden dimensions.
    few, ways = features[:50], spoken.centers @ spoken.mixing
    scores = -((few[:, None, None] - ways) ** 2).sum(axis=-1) / (2 * _frames.NOISE**2)
    assert np.array_equal(np.argmax(np.logaddexp.reduce(scores, axis=2), axis=1), spoken.best(few))


@pytest.mark.parametrize("name", figures.STUDIES)
def test_every_study_has_points_with_names(name):
    module = figures.study(name)
    scale = SimpleNamespace(seeds=2, epochs=1, settings=(), training=None)
    assert module.TITLE and module.KIND and module.PAPER.endswith(".")
    assert len(module.points(scale)) >= 2 and os.path.basename(module.__file__) == f"{name}.py"


JOB = {"accuracy": 0.98, "images_per_second": 9e3, "images": 100, "epochs": 1, "pushed_bytes": 5, "delay": 1.0}
FAKES = {
    "threads": {"model": "mnist", "threads": 1, "connections_per_second": 1e9},
    "server": {"path": "memory", "threads": 1, "gigabytes_per_second": 1.0},
    "strips": {"kind": "measured", "strips": 1, "connections": 10, "connections_per_second": 1e9},
    "replicas": {"kind": "measured", "replicas": 1, "images_per_second": 1e4},
    "traffic": {"protocol": "delta", "units": 256, "images": 32.0, "bytes_per_image": 9.0, "arithmetic": 8.0},
    "simulation": {
        "model": "large",
        "mode": "async",
        "ranks": 1,
        "hosts": None,
        "ratio": 1.1,
        "tries": [{"ratio": 1.1}],
        "delay_measured": 1,
        "delay_simulated": 2,
    },
    "clusters": {"machines": 24, "replicas": 4, "images_per_second": 9.0, "delay": 1, "server_busy": 0, "link_busy": 0},
}


@pytest.mark.parametrize("name", figures.STUDIES)
def test_every_study_draws_and_tells_what_is_there(name, tmp_path):
    module = figures.study(name)
    scale = SimpleNamespace(seeds=2, epochs=1, settings=(), training=None)
    named = list(module.points(scale))
    points = {point: FAKES.get(name, JOB | {"accuracy": 0.9 + 0.001 * at**2}) for at, point in enumerate(named)}
    figures.draw(tmp_path / "figure.svg", module, points)
    assert (tmp_path / "figure.svg").stat().st_size > 1000
    # The first point alone is what there is when a study has been cut.
    assert module.verdict({named[0]: points[named[0]]}).endswith(".") and module.verdict(points)


def test_what_others_use_of_the_machine_is_told():
    share = _others.others()
    worker = subprocess.run([sys.executable, "-c", "sum(range(10**7))"], check=True)
    assert worker.returncode == 0 and 0 <= share() <= 1
    assert _others.told([0.1, None, 0.25]) == "other programs used up to 25% of the cores meanwhile"
    assert _others.told([None]) == ""


def test_the_largest_that_fits():
    strips = figures.study("strips")
    for wanted in (1, 2, 3, 7, 64, 1000):
        assert strips._largest(lambda width, wanted=wanted: width <= wanted) == wanted


def test_the_page_is_made_from_the_results():
    assert results.PAGE.read_text() == results.page(results.FOLDER), "out of date: run scripts/reproduce results"


def test_the_page_says_what_has_not_been_run(tmp_path):
    page = results.page(tmp_path)
    assert page.count("Not run yet") == len(figures.STUDIES) + 3 and "scripts/reproduce ddp" in page
    assert list(table1.page(tmp_path)) == []
