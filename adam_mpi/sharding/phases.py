"""The phases of a job: train an epoch, validate, repeat or stop; at the end test once or not. Pure."""

from dataclasses import dataclass

from adam_mpi.config import Train


@dataclass(frozen=True)
class Phase:
    """A pass of all workers together through one part of the data set; `epoch` counts from 1."""

    number: int
    part: str
    epoch: int

    @property
    def training(self) -> bool:
        """Return whether weights change in this phase."""
        return self.part == "train"


class PhaseSchedule:
    """Decides which phase comes next, from the accuracies of validation phases."""

    def __init__(
        self,
        train: Train,
        validates: bool,
        epochs_done: int = 0,
        best: tuple[float, int] = (-1.0, 0),
        midway: bool = False,
    ) -> None:
        """Begin after `epochs_done` epochs, the last of which is not validated yet, or `midway` in the next one.

        `best` is the best accuracy so far, and its epoch.
        """
        self.train = train
        self.validates = validates
        self.best, self.best_epoch = best
        self.reason = "epochs"
        if epochs_done and validates and not midway:
            self.phase: Phase | None = Phase(0, "validation", epochs_done)
        else:
            self.phase = self._train_or_test(Phase(-1, "", epochs_done))

    def advance(self, accuracy: float) -> Phase | None:
        """Return the phase after the current one, which ended with `accuracy`; None when the job is done."""
        phase = self.phase
        assert phase is not None
        if phase.part == "test":
            self.phase = None
        elif phase.training and self.validates:
            self.phase = Phase(phase.number + 1, "validation", phase.epoch)
        elif phase.part == "validation" and self._should_stop(phase.epoch, accuracy):
            self.phase = self._test(phase)
        else:
            self.phase = self._train_or_test(phase)
        return self.phase

    def _train_or_test(self, phase: Phase) -> Phase | None:
        """Return the phase of the next epoch, or the test after the last one."""
        if phase.epoch < self.train.epochs:
            return Phase(phase.number + 1, "train", phase.epoch + 1)
        return self._test(phase)

    def _test(self, phase: Phase) -> Phase | None:
        """Return the test phase, if one is configured."""
        return Phase(phase.number + 1, "test", phase.epoch) if self.train.test else None

    def _should_stop(self, epoch: int, accuracy: float) -> bool:
        """Note the accuracy of `epoch`; return whether training stops before its last epoch."""
        if accuracy > self.best:
            self.best = accuracy
            self.best_epoch = epoch
        if self.train.target and accuracy >= self.train.target:
            self.reason = "target"
        elif self.train.patience and epoch - self.best_epoch >= self.train.patience:
            self.reason = "patience"
        return self.reason != "epochs"
