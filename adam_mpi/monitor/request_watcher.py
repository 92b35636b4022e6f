"""The lookout: sees the files by which people ask something of a running job, on a thread of its own.

A run directory that does not answer keeps nobody waiting.
"""

import logging
import threading
import time
from contextlib import suppress
from pathlib import Path

from adam_mpi.checkpoint.owner import Heartbeat
from adam_mpi.checkpoint.run_directory import COMPARE, GROW

STOP = "STOP"
LOOK_SECONDS = 0.25
log = logging.getLogger(__name__)


class RequestWatcher:
    def __init__(self, directory: Path, heart: Heartbeat) -> None:
        """Look into `directory` as long as `heart`, of the claim on the run, beats: later requests are for others."""
        self.directory, self.heart, self.stop = directory, heart, False
        self.compare = self.ranks = 0
        """How often the copies are to be compared, and how many ranks more are wanted, since they were taken."""
        threading.Thread(target=self._run, name="lookout", daemon=True).start()

    def take_compare(self) -> bool:
        """Whether the copies of all shards are to be compared."""
        wanted, self.compare = self.compare > 0, 0
        return wanted

    def take_ranks(self) -> int:
        """How many ranks more are wanted."""
        ranks, self.ranks = self.ranks, 0
        return ranks

    def _run(self) -> None:
        while self.heart.beats:
            with suppress(OSError):
                self._look()
            time.sleep(LOOK_SECONDS)

    def _look(self) -> None:
        self.stop = (self.directory / STOP).exists()
        if (self.directory / COMPARE).exists():
            (self.directory / COMPARE).unlink()
            self.compare += 1
        if (self.directory / GROW).exists():
            text = (self.directory / GROW).read_text()
            (self.directory / GROW).unlink()
            with suppress(ValueError):
                self.ranks += int(text)
