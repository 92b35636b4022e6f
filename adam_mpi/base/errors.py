"""The errors that people meet: a wrong input, a lost rank or run directory, a job that cannot go on."""


class UserError(Exception):
    """What was given cannot work; the message is one line for a person, shown without a traceback (exit code 2)."""


class RankFailure(Exception):
    """A member of this generation is dead, or somebody has declared the generation over."""


class Regroup(RankFailure):
    """Nobody is lost: ranks that stand by join in the next generation, up to `full`."""

    def __init__(self, full: int) -> None:
        super().__init__(f"ranks that stand by join, up to {full}")
        self.full = full


class LostRun(Exception):
    """Another job has the run directory now: this one writes nothing more into it, and ends."""


class LostState(Exception):
    """The ranks that are left do not have all that is needed to go on."""


class Stall(Exception):
    """Another rank owes an answer for too long, though it lives: somebody may have cut the network."""


class JobEnded(Exception):
    """Another rank has failed, and has said why: the job ends."""
