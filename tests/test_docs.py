"""The documents: every command in them is understood, with --full every command runs; links lead somewhere."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys

import numpy as np
import pytest
from launch import ROOT, available, clean_environment
from PIL import Image

from adam_mpi import config
from adam_mpi.cli import COMMANDS
from adam_mpi.data import glyphs
from adam_mpi.options import parser

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "slurm/README.md", ROOT / "data/README.md"]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
# What is not run here, and where it is instead.
ELSEWHERE = {
    "sbatch": "tests/test_slurm.py",
    "srun": "tests/test_slurm.py",
    "scripts/slurm_lab": "tests/test_slurm.py",
    "eval": "tests/test_slurm.py",
    "export": "tests/test_slurm.py",
    "mpirun": "tests/launch.py",
    "scripts/test": ".ci/run",
    "scripts/bench.py": "by hand, on an idle machine",
    "pip": "scripts/lib.sh",
    "kill": "tests/test_resume.py",
    "touch": "tests/test_resume.py",
    ".": "PATH is set here",
    "python -m adam_mpi fetch": "tests/test_fetch.py",
    "scripts/hosts": "tests/test_hosts.py",
    "git": "by hand",
    "scripts/chaos": "tests/test_chaos.py",
    "scripts/failure_matrix": "by hand",
    "scripts/reproduce": "tests/test_reproduce.py, the whole by hand",
}
# Enough for a job to go all its way.
SMALL = ["data.images=640", "train.epochs=1", "data.validation=0.02"]


def commands(page):
    """The commands in a page: indented lines that begin with a program, without comments and synopses."""
    text = re.sub(r"```python.*?```", "", page.read_text(), flags=re.S).replace("\\\n", " ")
    for line in re.findall(r"^ {4,}(\S.*)$", text, re.M):
        if re.match(r"(python|scripts/\S+|mpirun|sbatch|srun|pip|adam-mpi|kill|touch|\.|eval|export|git) ", line + " "):
            words = shlex.split(line, comments=True)
            if not any(word.startswith("[") and "faults" not in word for word in words):
                yield [word for word in words if word != "..."]


def program(words):
    return " ".join(words[:4]) if " ".join(words[:4]) in ELSEWHERE else words[0]


def arguments(words):
    """What the program itself is given, or None where it is not ours."""
    if words[0] == "scripts/train":
        words = words[1:]
        while words and words[0] in ("-n", "--restarts"):
            words = words[2:]
        return ["train", *words]
    if "slurm/train.sh" in words:
        return ["train", *words[words.index("slurm/train.sh") + 1 :]]
    if "adam_mpi" in words:
        rest = words[words.index("adam_mpi") + 1 :]
        return rest or ["train"]
    return None


@pytest.mark.parametrize("name", NAMES)
def test_every_command_is_understood(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.toml").write_text("")
    for words in commands(ROOT / name):
        given = arguments(words[: words.index(">")] if ">" in words else words)
        if given is None:
            known = words[0] in ("python", "scripts/train") or program(words) in ELSEWHERE
            assert known and (not words[0].startswith("scripts/") or (ROOT / words[0]).exists()), words
            continue
        try:
            known = parser(dict.fromkeys(COMMANDS, ""))
            options = known.parse_args([word for word in given if not word.startswith("@")])
        except SystemExit:
            pytest.fail(f"{name}: not understood: {shlex.join(words)}")
        if hasattr(options, "set"):
            missing = options.config and options.config.endswith(".toml") and not (ROOT / options.config).exists()
            config.load("my.toml" if missing else options.config and str(_place(options.config)), options.set)


def _place(given):
    return ROOT / given if (ROOT / given).exists() else given


def launchers():
    """How the pages call mpirun on this machine: all that comes before the program."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for line in re.findall(r"(?:^ {4,}|`)(mpirun .*?-n \d+) +\S*python ", text, re.M):
            yield pytest.param(shlex.split(line), id=f"{page.relative_to(ROOT)}: {line}")


@pytest.mark.parametrize("words", list(launchers()))
def test_mpirun_as_it_is_written_starts_here_with_two_cores_as_whoever_we_are(words, tmp_path):
    (mpi,) = [mpi for mpi in available() if mpi.name == "openmpi"] or [None]
    if mpi is None:
        pytest.skip("no Open MPI")
    allowed = dict(re.findall(r"(OMPI_ALLOW\w+)=(1)", (ROOT / "docs/howto/clusters.md").read_text()))
    environment = {key: value for key, value in clean_environment().items() if "OMPI_ALLOW" not in key}
    environment |= {"TMPDIR": str(tmp_path)} | (allowed if os.geteuid() == 0 else {})
    # Not more cores than a small laptop has, whatever this machine is.
    cores = ["taskset", "-c", ",".join(map(str, sorted(os.sched_getaffinity(0))[:2]))]
    command = [*cores, str(mpi.mpirun), *words[1:], "echo", "here"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    ranks = int(words[words.index("-n") + 1])
    assert (done.returncode, done.stdout) == (0, "here\n" * ranks), done.stderr


@pytest.fixture
def sandbox(tmp_path):
    """A folder with what the documents speak of."""
    (tmp_path / "my.toml").write_text("[optimizer]\nlearning_rate = 0.02\n")
    (tmp_path / "cluster.toml").write_text("[hosts]\ncount = 2\n")
    images, labels = glyphs.draw_glyphs(1, "test", np.arange(5))
    (tmp_path / "digits").mkdir()
    for index, image in enumerate(images):
        (tmp_path / "DIR" / f"class{index % 2}").mkdir(parents=True, exist_ok=True)
        for file in (tmp_path / "digits" / f"{index}.png", tmp_path / "DIR" / f"class{index % 2}" / f"{index}.png"):
            Image.fromarray(image[0]).save(file)
    Image.fromarray(images[0, 0]).save(tmp_path / "digit.png")
    np.savez(tmp_path / "test.npz", images=images, labels=labels)
    for name in ("examples", "scripts", "adam_mpi"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    return tmp_path


def smaller(words):
    """The command as it is written, with fewer images where it trains."""
    if words[0] == "scripts/train" or words[:4] == ["python", "-m", "adam_mpi", "sweep"]:
        words = words + [word for pair in SMALL for word in ("--set", pair)]
    return [str(ROOT / words[0]) if words[0].startswith("scripts/") else words[0], *words[1:]]


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", NAMES)
def test_every_command_runs(name, sandbox):
    path = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    for words in commands(ROOT / name):
        if program(words) in ELSEWHERE:
            continue
        if words[0] == "scripts/train":
            words = [*words, *_fresh(words, sandbox)]
        words, _, target = (words[:-2], *words[-2:]) if ">" in words else (words, "", "")
        done = subprocess.run(
            smaller(words),
            cwd=sandbox,
            env=clean_environment() | {"PATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=280,
        )
        if target:
            (sandbox / target).write_text(done.stdout)
        # Some are meant to lose a rank.
        assert done.returncode == 0 or "kill" in " ".join(words), f"{shlex.join(words)}\n{done.stdout}{done.stderr}"


def _fresh(words, sandbox):
    """Jobs without a run directory would have the same name within a second."""
    return [] if "--run" in words else ["--run", f"runs/{len(list(sandbox.glob('runs/*')))}"]


@pytest.mark.full
def test_the_python_of_the_pages_runs(sandbox):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/howto/inference.md").read_text(), re.S)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=sandbox, env=clean_environment(), capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", [*NAMES, "CONTRIBUTING.md"])
def test_links_lead_somewhere(name):
    text = (ROOT / name).read_text()
    for link in re.findall(r"\]\(([^)]+)\)", text):
        file, _, anchor = link.partition("#")
        if file.startswith("http"):
            continue
        target = (ROOT / name).parent / file if file else ROOT / name
        assert target.exists(), f"{name}: {link}"
        if anchor:
            heads = re.findall(r"^#+ (.*)$", target.read_text(), re.M)
            anchors = [re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads]
            assert anchor in anchors, f"{name}: {link}"


def test_the_configuration_reference_is_up_to_date():
    spec = importlib.util.spec_from_file_location("reference", ROOT / "scripts" / "config_reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.PAGE.read_text() == module.page(), "out of date: run scripts/config_reference.py"


def test_sweeps_of_the_first_pages_do_not_share_a_folder():
    """One after the other in one checkout: a second sweep of other jobs in a folder is refused."""
    held = {}
    for page in ("README.md", "docs/tutorial.md"):
        for words in commands(ROOT / page):
            if words[:4] == ["python", "-m", "adam_mpi", "sweep"]:
                options = parser(dict.fromkeys(COMMANDS, "")).parse_args(words[3:])
                assert held.setdefault(options.output or options.over[0].partition("=")[0], words) == words


def test_every_environment_variable_is_in_the_reference():
    listed = set(re.findall(r"^\| `(ADAM_MPI_\w+)`", (ROOT / "docs/reference/environment.md").read_text(), re.M))
    folders = [ROOT / name for name in ("adam_mpi", "scripts", "slurm", ".ci")]
    paths = [path for folder in folders for path in folder.rglob("*") if path.suffix in ("", ".py", ".sh")]
    files = [path for path in paths if path.is_file()]
    used = {name for path in files for name in re.findall(r"ADAM_MPI_[A-Z_]+[A-Z]", path.read_text())}
    assert used == listed
