"""Watches the run directory for the files by which people make requests to a running job, in a thread of its own.

A run directory that does not answer keeps no rank waiting.
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
    """Collects the requests STOP, COMPARE and GROW."""

    def __init__(self, directory: Path, heart: Heartbeat) -> None:
        """Watch `directory` while the job has the run, as its `heart` shows: later requests are for other jobs."""
        self.directory = directory
        self.heart = heart
        self.stop = False
        """Whether the job is to stop."""
        self.compare = 0
        """Requests to compare copies that were not taken yet."""
        self.ranks = 0
        """Ranks to add that were not taken yet."""
        threading.Thread(target=self._run, name="requests", daemon=True).start()

    def take_compare(self) -> bool:
        """Return whether there was a request to compare the copies of all shards; forget it."""
        requested = self.compare > 0
        self.compare = 0
        return requested

    def take_ranks(self) -> int:
        """Return how many ranks were requested; forget them."""
        ranks = self.ranks
        self.ranks = 0
        return ranks

    def _run(self) -> None:
        while self.heart.alive:
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
