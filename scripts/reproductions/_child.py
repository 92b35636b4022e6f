"""Programs that end when we do, however that is: a job left behind takes the cores from whatever is measured next."""

import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

TETHER = ("setpriv", "--pdeathsig", "TERM")
"""Where there is one, the kernel ends them even when we are killed."""
GRACE = 20.0
"""Seconds for a job to end all its ranks."""


def run(command: Sequence[Any], seconds: float | None = None, **how: Any) -> int:
    """Until it ends: its status. Whatever is raised meanwhile ends it first."""
    tether = TETHER if shutil.which(TETHER[0]) else ()
    process = subprocess.Popen([*tether, *command], stdin=subprocess.DEVNULL, **how)
    try:
        return process.wait(seconds)
    except BaseException:
        process.terminate()
        try:
            process.wait(GRACE)
        except subprocess.TimeoutExpired:
            process.kill()
        raise
