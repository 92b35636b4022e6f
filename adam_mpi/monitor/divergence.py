"""Decide whether training has diverged, from windows of its losses and from norms of its weights. Pure.

`LossWindows` cuts the totals that data ranks report into windows of enough images to have a mean loss with little
noise. `DivergenceDetector` compares each window with the best loss so far and with chance, the loss of guessing:

| window | it is suspect if | it is an alarm after |
| --- | --- | --- |
| not finite | the losses of most of its images are not finite | 2 windows, 0.8 s |
| exploded | its loss is 10 times chance or more (if nothing was learned, 10 times the first) | 2 windows, 0.8 s |
| lost | the loss has lost most of its way from chance to its best, which was clearly below chance | 3 windows, 2 s |
| dead | nothing was learned, it is at chance or above, and all units of a layer are dead | 3 windows, 2 s |
| never learned | nothing was learned, it is at chance or above, and the loss had doubled before | 10 windows, 8 s |

A suspect window with weights of ten times their norm in the last good window shortens the wait to that of "exploded".
A window that is not suspect ends the wait. Slow starts are no alarm: a loss that stays at chance is none by itself.
"""

import math
import statistics
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_IMAGES = 256
"""Images of a window."""
LEAST_SECONDS = 0.2
"""Duration of a window."""
EXPLODED = 10.0
"""A loss of so many times chance has exploded."""
SPIKE = 2.0
"""A rise to so many times chance and the first loss, before anything is learned, is the mark of a rate too high."""
LEARNED = 0.8
"""A smoothed loss below this share of chance has learned something."""
LOST = 0.6
"""A window is suspect when its loss has lost this share of the way from chance to the best loss."""
LEAST_LOST = 0.25
"""It must be above the best loss by this share of chance, or at chance."""
GOOD = 0.2
"""A window is good when its loss has lost less than this share of the way."""
AT_CHANCE = 0.97
"""Losses from this share of chance on are at chance."""
NOISE = 8.0
"""A loss is suspect only if it is above the best one by this many times the mean upward step between windows."""
NOISE_SHARE = 0.1
"""Weight of a window in the mean upward step."""
GROWTH = 10.0
"""Weights of so many times their norm in the last good window have exploded."""
FIRST_WINDOWS = 3
"""Windows whose median loss stands for chance where that is not known."""


@dataclass(frozen=True)
class LossTotals:
    """The losses of a phase so far, summed over all data ranks."""

    images: float
    loss: float
    """Sum of the finite losses."""
    not_finite: float
    """Images whose loss is not finite."""


@dataclass(frozen=True)
class LossWindow:
    """The mean loss of some images in a row, and what is known about the weights at its end."""

    began: float
    ended: float
    """In seconds, on any clock."""
    images: float
    loss: float
    """Mean over the images with a finite loss; NaN if there is none."""
    not_finite: float = 0.0
    """Share of the images whose loss is not finite."""
    weight_norm: float | None = None
    dead: bool = False
    """Whether all units of a layer are dead."""


class LossWindows:
    """Cuts the totals of one phase into windows."""

    def __init__(self, now: float, totals: LossTotals = LossTotals(0, 0, 0)) -> None:  # noqa: B008
        """Begin the windows of losses at time `now` with these `totals`."""
        self.began = now
        self.before = totals

    def add(
        self, now: float, totals: LossTotals, weight_norm: float | None = None, dead: bool = False
    ) -> LossWindow | None:
        """Return the window of losses that ends with these `totals`; None if it has too few images or is too short."""
        images = totals.images - self.before.images
        if images < LEAST_IMAGES or now - self.began < LEAST_SECONDS:
            return None
        not_finite = totals.not_finite - self.before.not_finite
        finite = images - not_finite
        window = LossWindow(
            began=self.began,
            ended=now,
            images=images,
            loss=(totals.loss - self.before.loss) / finite if finite > 0 else math.nan,
            not_finite=not_finite / images,
            weight_norm=weight_norm,
            dead=dead,
        )
        self.began = now
        self.before = totals
        return window


@dataclass(frozen=True)
class Suspicion:
    """Why a window is suspect, and how long windows must be suspect for an alarm."""

    reason: str
    windows: int
    seconds: float


NOT_FINITE = Suspicion("not finite", windows=2, seconds=0.8)
EXPLODING = Suspicion("exploded", windows=2, seconds=0.8)
FAR_ABOVE = Suspicion("lost", windows=3, seconds=2.0)
DEAD = Suspicion("dead", windows=3, seconds=2.0)
NEVER_LEARNED = Suspicion("never learned", windows=10, seconds=8.0)


@dataclass(frozen=True)
class Alarm:
    """Training has diverged."""

    reason: str
    loss: float
    best: float
    chance: float
    seconds: float
    """For how long windows were suspect."""
    growth: float = 1.0
    """The norm of the weights as a multiple of that in the last good window."""

    def describe(self) -> str:
        """Return how training has diverged, as a clause for people."""
        times = f"are {self.growth:.3g} times as large as before" if math.isfinite(self.growth) else "have overflowed"
        grown = f", and weights {times}" if self.growth >= GROWTH else ""
        if self.reason == "not finite":
            return f"most losses have not been finite for {self.seconds:.1f} s{grown}"
        was = f"it was {self.best:.3g} before, and guessing has {self.chance:.3g}"
        if self.best >= LEARNED * self.chance:
            was = f"guessing has {self.chance:.3g}, and nothing better was reached"
        dead = ", and all units of a layer are dead" if self.reason == "dead" else ""
        return f"the loss has been {self.loss:.3g} or so for {self.seconds:.1f} s; {was}{dead}{grown}"


class DivergenceDetector:
    """Raises an alarm when windows have been suspect for long enough."""

    def __init__(self, chance: float | None = None) -> None:
        """Begin to detect divergence; `chance`: the loss of guessing, or None for that of the first windows."""
        self.chance = chance
        self.best = math.inf
        """The lowest smoothed loss."""
        self.first: float | None = None
        """The loss of the first window."""
        self.highest = 0.0
        """The highest loss of a window before anything was learned."""
        self.recent: deque[float] = deque(maxlen=FIRST_WINDOWS)
        """The losses of the last windows that were not suspect."""
        self.upward = 0.0
        """The mean upward step from window to window."""
        self.steps = 0
        """The number of steps from window to window."""
        self.norm: float | None = None
        """The norm of the weights in the last good window."""
        self.good_from = -math.inf
        """When the last good window began: weights from before that are good."""
        self.suspect_since: float | None = None
        self.suspect_windows = 0

    def to_json(self) -> dict[str, Any]:
        """Return what the divergence detector of the next coordinator continues from, as JSON values."""
        return {
            "chance": self.chance,
            "best": self.best if math.isfinite(self.best) else None,
            "first": self.first,
            "highest": self.highest,
            "upward": self.upward,
            "steps": self.steps,
            "norm": self.norm,
        }

    def restore(self, values: Mapping[str, Any]) -> None:
        """Continue the detection of divergence from the `values` of `to_json`."""
        self.chance = values["chance"]
        self.best = math.inf if values["best"] is None else values["best"]
        self.first = values["first"]
        self.highest = values["highest"]
        self.upward = values["upward"]
        self.steps = values["steps"]
        self.norm = values["norm"]

    @property
    def learned(self) -> bool:
        """Return whether the loss was clearly below chance, so that a return to chance is divergence."""
        return self.chance is not None and self.best < LEARNED * self.chance

    def add(self, window: LossWindow) -> Alarm | None:
        """Take the next window of losses; return an alarm if training has diverged."""
        if self.first is None and math.isfinite(window.loss):
            self.first = window.loss
        if math.isfinite(window.loss) and not self.learned:
            self.highest = max(self.highest, window.loss)
        suspicion = self._suspicion(window)
        if suspicion is None:
            self.suspect_since = None
            self.suspect_windows = 0
            self._note_sound(window)
            return None
        if self.suspect_since is None:
            self.suspect_since = window.began
        self.suspect_windows += 1
        growth = self._growth(window)
        needed = EXPLODING if growth >= GROWTH and suspicion.windows > EXPLODING.windows else suspicion
        seconds = window.ended - self.suspect_since
        if self.suspect_windows < needed.windows or seconds < needed.seconds:
            return None
        chance = math.nan if self.chance is None else self.chance
        return Alarm(
            reason=suspicion.reason, loss=window.loss, best=self.best, chance=chance, seconds=seconds, growth=growth
        )

    def _suspicion(self, window: LossWindow) -> Suspicion | None:
        """Return why `window` of losses makes divergence likely; None if it does not."""
        if 2 * window.not_finite > 1 or not math.isfinite(window.loss):
            return NOT_FINITE
        if self.chance is None or self.first is None:
            return None
        if self.learned:
            return self._suspicion_after_learning(window, self.chance)
        if window.loss >= EXPLODED * max(self.chance, self.first):
            return EXPLODING
        if window.loss < AT_CHANCE * self.chance:
            return None
        if window.dead:
            return DEAD
        # A first window that has exploded already is no measure of the initial weights.
        start = min(max(self.first, self.chance), EXPLODED * self.chance)
        return NEVER_LEARNED if self.highest >= SPIKE * start else None

    def _suspicion_after_learning(self, window: LossWindow, chance: float) -> Suspicion | None:
        """Return why `window` is suspect of divergence where the loss was clearly below `chance`, or None."""
        if window.loss >= EXPLODED * chance:
            return EXPLODING
        lost = self.best + max(LOST * (chance - self.best), LEAST_LOST * chance)
        above_noise = window.loss - self.best > NOISE * self.upward
        return FAR_ABOVE if above_noise and window.loss >= min(lost, AT_CHANCE * chance) else None

    def _growth(self, window: LossWindow) -> float:
        """Return the norm of the weights as a multiple of that in the last window without divergence."""
        if not self.norm or window.weight_norm is None:
            return 1.0
        return window.weight_norm / self.norm if math.isfinite(window.weight_norm) else math.inf

    def _note_sound(self, window: LossWindow) -> None:
        """Learn from a window of losses that is not suspect of divergence."""
        if self.recent:
            self.steps += 1
            upward = max(0.0, window.loss - self.recent[-1])
            self.upward += max(NOISE_SHARE, 1 / self.steps) * (upward - self.upward)
        self.recent.append(window.loss)
        smoothed = statistics.median(self.recent)
        if len(self.recent) == FIRST_WINDOWS:
            self.best = min(self.best, smoothed)
            if self.chance is None:
                self.chance = smoothed
        if self._is_good(window):
            self.good_from = window.began
            self.norm = window.weight_norm or self.norm

    def _is_good(self, window: LossWindow) -> bool:
        """Return whether the loss of a sound window is near its best, or not above the first ones."""
        if not self.learned or self.chance is None:
            return True
        limit = self.best + max(GOOD * (self.chance - self.best), NOISE / 2 * self.upward)
        return window.loss <= limit
