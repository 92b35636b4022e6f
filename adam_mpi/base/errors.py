"""The exceptions of a job: wrong input, a lost rank or run directory, a job that cannot continue."""


class UserError(Exception):
    """The input is wrong; the message is one line that is printed without a traceback (exit code 2)."""


class RankFailure(Exception):
    """A member of this generation is dead, or another rank has ended the generation."""


class Regroup(RankFailure):
    """No rank is lost, but spares join: a new generation with up to `full` ranks begins."""

    def __init__(self, full: int) -> None:
        super().__init__(f"spares join, up to {full} ranks")
        self.full = full


class GoingBack(RankFailure):
    """No rank is lost, but training has diverged: a new generation begins from an earlier state."""


class LostRun(Exception):
    """Another job owns the run directory now: this one writes nothing more into it and ends."""


class LostState(Exception):
    """The surviving ranks lack state without which the job cannot continue."""


class Stall(Exception):
    """A live rank has not answered within the time limit; the network may be partitioned."""


class JobEnded(Exception):
    """Another rank has failed and reported why; the job ends."""
