"""The report: one page about runs side by side, opened in a real browser."""

import base64
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, render
from launch import given

from adam_mpi.base.errors import UserError
from adam_mpi.report import charts, names

REPORT = [sys.executable, "-m", "adam_mpi", "report"]
SECTIONS = (
    "Runs",
    "Curves",
    "Throughput by role",
    "Staleness",
    "Traffic by layer and protocol",
    "Balance of workers and strips",
    "Recoveries",
    "Layers",
    "What it learned",
)

# Counts the images of the page, and those that have no size.
PROBE = """<script>addEventListener("load", () => {
    const images = [...document.images], broken = images.filter(image => !image.complete || !image.naturalWidth);
    document.title = JSON.stringify({images: images.length, broken: broken.length});
})</script></body>"""


def run_report(*arguments):
    return subprocess.run([*REPORT, *map(str, arguments)], capture_output=True, text=True, timeout=100)


@pytest.fixture
def run(launch):
    job = launch(4, "train", *given("data.images=3000", "train.epochs=2", "observe.interval=0.3"))
    assert job.returncode == 0, job.said()
    return job.run


def test_two_runs_on_one_page_in_a_browser(run, tmp_path):
    """The second is the first with other settings and with a recovery."""
    other = tmp_path / "other"
    shutil.copytree(run, other)
    settings = (other / "config.toml").read_text()
    (other / "config.toml").write_text(settings.replace("staleness = inf", "staleness = 3.0"))
    summary = json.loads((other / "summary.json").read_text())
    summary["recoveries"] = [{"generation": 1, "dead": ["rank 3, worker on vm"], "seconds": 0.25, "lost": 0}]
    (other / "summary.json").write_text(json.dumps(summary))
    page = tmp_path / "report.html"
    done = run_report(run, other, "-o", page)
    assert done.returncode == 0 and "2 runs" in done.stdout, done.stderr
    text = page.read_text()
    assert all(f">{section}" in text for section in SECTIONS)
    assert "consistency.staleness" in text and "rank 3, worker on vm" in text
    # Self-contained: nothing is loaded from anywhere.
    assert not re.findall(r'(?:src|href)="(?!data:|#)', text)
    if CHROMIUM is None:
        pytest.skip("no Chromium to open the page in (Debian: apt install chromium)")
    probed = tmp_path / "probed.html"
    probed.write_text(text.replace("</body>", PROBE))
    document, console, shot = render(probed, tmp_path)
    found = json.loads(re.search(r"<title>(.*?)</title>", document)[1])
    assert found["images"] >= 20 and found["broken"] == 0 and console == ""
    assert ink(shot) > 0.02, "the page is all but empty"


def ink(shot):
    """Return the share of a picture that is not white."""
    from PIL import Image

    return float(np.mean(np.asarray(Image.open(shot).convert("L")) < 250))


def test_a_run_without_weights_has_the_other_sections(run, tmp_path):
    (run / "weights.h5").unlink()
    shutil.rmtree(run / "snapshots")
    page = tmp_path / "report.html"
    assert run_report(run, "-o", page).returncode == 0
    assert "Not shown: " in page.read_text() and "no weights" in page.read_text()


def test_runs_have_different_names():
    assert names([Path("runs/a"), Path("runs/b")]) == ["a", "b"]
    assert names([Path("x/run"), Path("y/run")]) == ["x/run", "y/run"]
    with pytest.raises(UserError, match="given twice"):
        names([Path("runs/a"), Path("runs/a")])


def test_a_folder_without_a_run_is_refused(tmp_path):
    done = run_report(tmp_path, "-o", tmp_path / "report.html")
    assert done.returncode == 2 and "no config.toml" in done.stderr and not (tmp_path / "report.html").exists()


def test_a_dollar_in_a_name_starts_no_formula():
    """Matplotlib takes text between two dollars for a formula, and raises if it is none."""
    names = ["$5 and $10", r"$\frac{$", "_^"]
    pictures = [
        charts.matrix("$a_b$", np.eye(3, dtype=int), names),
        charts.lines("$c$", {name: ([1, 2, 3], [1e-3, 1.0, 10.0]) for name in names}, "x", "y", log=True),
        charts.gallery("$d$", np.zeros((3, 1, 2, 2)), names),
    ]
    drawn = base64.b64decode(pictures[0].partition("base64,")[2].rstrip('">')).decode()
    assert "$5 and $10" in drawn and "$a_b$" in drawn
    assert "mathdefault" not in base64.b64decode(pictures[1].partition("base64,")[2].rstrip('">')).decode()
