"""The command line: errors are one line and exit code 2 on any rank; commands that need no MPI work without it."""

import gzip
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from launch import ROOT, given

import adam_mpi
from adam_mpi import config
from adam_mpi.cli import main
from adam_mpi.cluster import report_once


def refused(job):
    """Return the one line that a job with an error has printed."""
    lines = re.findall(r"^adam_mpi: .*", job.stderr, re.M)
    assert job.returncode == 2 and len(lines) == 1 and "Traceback" not in job.stderr + job.stdout, job.said()
    assert job.seconds < 60 and job.left_over() == []
    return lines[0].removeprefix("adam_mpi: ")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (given("train.epoch=3"), "--set: unknown key train.epoch; did you mean train.epochs?"),
        (given("train.epochs=many"), "--set: train.epochs = 'many': expected a whole number"),
        (given("layout.servers=3"), "layout.data = 1 and layout.servers = 3 leave no worker"),
        (given("data.set=mnits"), "data set 'mnits': unknown; allowed are glyphs, mnist, fashion"),
        (given('model.layers=["relv"]'), "model.layers[0]"),
        (given('inject.faults=["explode rank=1"]'), "inject.faults[0] = 'explode rank=1': unknown fault"),
        (given('inject.faults=["kill rank=3 at=push"]'), "inject.faults[0]: there is no rank 3; give one of 0 to 2"),
        (["missing.toml"], "config missing.toml: No such file or directory"),
        (["--max-minutes", "x"], "argument --max-minutes: invalid float value: 'x'; what is allowed: python -m"),
    ],
)
def test_an_error_is_one_line_from_one_rank(arguments, text, launch):
    job = launch(3, "train", *arguments)
    assert refused(job).startswith(text)
    assert not job.run.exists()


def test_a_rank_that_printed_an_error_waits_for_others_for_a_limited_time(monkeypatch, capsys):
    """Another rank may run another program, which never joins the barrier."""

    class Never:
        def Test(self):
            return False

    def end(code):
        raise SystemExit(f"ended with {code}")

    world = SimpleNamespace(COMM_WORLD=SimpleNamespace(Ibarrier=Never))
    monkeypatch.setitem(sys.modules, "mpi4py", SimpleNamespace(MPI=world))
    monkeypatch.setattr(report_once, "TOGETHER_SECONDS", 0.0)
    monkeypatch.setattr(report_once.os, "_exit", end)
    for number, printed in (("0", "adam_mpi: a mistake\n"), ("1", "")):
        monkeypatch.setenv("PMI_RANK", number)
        with pytest.raises(SystemExit, match="ended with 2"):
            report_once.print_once("adam_mpi: a mistake")
        assert capsys.readouterr().err == printed


def test_one_rank_prints_the_help(monkeypatch, capsys):
    monkeypatch.setenv("PMI_RANK", "1")
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    assert capsys.readouterr().out == ""


def test_a_run_directory_is_never_overwritten(launch, tmp_path):
    run = tmp_path / "mine"
    run.mkdir()
    (run / "config.toml").write_text("")
    said = refused(launch(3, "train", "--run", run))
    assert said == f"run directory {run} holds a run; add --resume to continue it, or give another"
    assert [path.name for path in run.iterdir()] == ["config.toml"]


def idx(array):
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes() + array.tobytes()


def test_an_error_that_only_one_rank_sees_ends_all(launch, tmp_path):
    folder = tmp_path / "data" / "mnist"
    folder.mkdir(parents=True)
    for part, count in (("train", 60), ("t10k", 20)):
        pixels = np.random.default_rng(0).integers(0, 256, (count, 28, 28)).astype(np.uint8)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(pixels)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx((np.arange(count) % 10).astype(np.uint8)))
    # The first check reads only the beginning and the end, which are intact.
    images = folder / "train-images-idx3-ubyte.gz"
    content = bytearray(images.read_bytes())
    content[len(content) // 2] ^= 255
    images.write_bytes(content)
    job = launch(3, "train", *given("data.set=mnist"), environment={"ADAM_MPI_DATA": str(tmp_path / "data")})
    assert re.match(rf"rank 0, data on \S+: {images}: ", refused(job))
    assert job.summary["status"] == "failed"


def without_mpi(*arguments):
    """Run a command in a Python that has no mpi4py."""
    program = "import sys; sys.modules['mpi4py'] = None; from adam_mpi.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_plan_needs_no_mpi():
    done = without_mpi("plan", "-n", 32, "--hosts", "4x8", *given("layout.servers=4"))
    assert done.returncode == 0 and done.stderr == ""
    assert done.stdout.startswith("32 ranks: 4 data, 24 worker in 24 replicas of 1, 4 server")
    servers = re.findall(r"rank \d+, server on (host\d)", done.stdout)
    assert len(servers) == len(set(servers)) == 4


def test_a_closed_pipe_is_no_error():
    command = [sys.executable, "-m", "adam_mpi", "plan", "-n", "2000"]
    job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    job.stdout.close()
    assert (job.stderr.read(), job.wait(60)) == (b"", 0)


def test_plan_refuses_an_impossible_layout():
    done = without_mpi("plan", "-n", 2, *given("layout.partitions=3"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "adam_mpi: layout.partitions = 3: only 2 ranks; start more or set at most 2\n"


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_lists_every_key_with_its_sentence(command, capsys):
    with pytest.raises(SystemExit, match="0"):
        main([command, "--help"])
    text = capsys.readouterr().out
    assert all(f"  {key} = " in text and sentence in text for key, _, sentence in config.documentation())


def test_one_rank_prints_the_version(monkeypatch, capsys):
    version = adam_mpi.__version__
    for number, printed in (("0", f"adam-mpi {version}\n"), ("1", "")):
        monkeypatch.setenv("PMI_RANK", number)
        with pytest.raises(SystemExit, match="0"):
            main(["--version"])
        assert capsys.readouterr().out == printed


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(re.search(rf"^    {command} ", text, re.M) for command in ("train", "eval", "plan", "fetch"))


def test_fetch_names_what_it_does_not_know(capsys):
    assert main(["fetch", "imagenet"]) == 2
    text = capsys.readouterr().err
    assert text.startswith("adam_mpi: ") and "imagenet" in text and "mnist" in text and text.count("\n") == 1


def test_eval_wants_weights(tmp_path, capsys):
    assert main(["eval", str(tmp_path)]) == 2
    text = capsys.readouterr().err
    assert text == f"adam_mpi: {tmp_path}: no weights; give a run directory, a snapshot or a file of weights\n"
