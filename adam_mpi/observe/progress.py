"""Progress for people: a bar on a terminal, a plain line per interval elsewhere."""

import os
import sys
from typing import Any

from tqdm import tqdm

from adam_mpi.data.course import Phase


class Progress:
    def __init__(self, epochs: int) -> None:
        self.epochs = epochs
        # Launchers put a pipe between a rank and the terminal; scripts/train knows what is at its other end.
        self.terminal = os.environ.get("ADAM_MPI_TERMINAL", "") == "1" or sys.stderr.isatty()
        self.bar: tqdm | None = None

    def begin(self, phase: Phase, images: int) -> None:
        if self.terminal:
            self.bar = tqdm(total=images, desc=self._name(phase), unit=" images", ascii=True)

    def update(self, phase: Phase, images: int, share: float, figures: dict[str, Any]) -> None:
        text = "  ".join(f"{name} {value}" for name, value in figures.items())
        if self.bar is not None:
            self.bar.set_postfix_str(text, refresh=False)
            self.bar.update(images - self.bar.n)
        else:
            self.say(f"{self._name(phase)}  {share:4.0%}  {text}")

    def end(self, phase: Phase, images: int, figures: dict[str, Any]) -> None:
        self.update(phase, images, 1.0, figures)
        if self.bar is not None:
            self.bar.close()
            self.bar = None

    def say(self, text: str) -> None:
        print(text, flush=True)

    def _name(self, phase: Phase) -> str:
        return f"epoch {phase.epoch}/{self.epochs} {phase.part}" if phase.part != "test" else "test"
