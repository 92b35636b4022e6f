"""A real browser without a screen: what a page looks like, and what it complains about."""

import shutil
import subprocess
from pathlib import Path

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def render(page: Path, folder: Path) -> tuple[str, str, Path]:
    """(the document after scripts and images are loaded, messages of the page, a screenshot)"""
    shot = folder / "shot.png"
    command = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        f"--user-data-dir={folder / 'profile'}",
        "--enable-logging=stderr",
        "--window-size=1250,5000",
        "--virtual-time-budget=10000",
    ]
    done = [
        subprocess.run([*command, way, page.as_uri()], capture_output=True, text=True, timeout=100, check=True)
        for way in ("--dump-dom", f"--screenshot={shot}")
    ]
    console = "\n".join(line for each in done for line in each.stderr.splitlines() if ":CONSOLE" in line)
    return done[0].stdout, console, shot
