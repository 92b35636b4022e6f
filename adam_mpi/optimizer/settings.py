"""What the coefficients of a step depend on: the settings of a rule, and counts of images and batches. Pure."""

from typing import NamedTuple

from adam_mpi.config import Optimizer


class Settings(NamedTuple):
    """The numbers of `[optimizer]` that the coefficients of a rule depend on, besides the learning rate."""

    momentum: float = 0.0
    decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    l1: float = 0.0


def settings_of(optimizer: Optimizer) -> Settings:
    """Return the settings of `optimizer` for the servers.

    Where replicas keep the velocity, decay does not pass through it: the servers decay as much as it would add up to.
    """
    found = Settings(**{name: getattr(optimizer, name) for name in Settings._fields})
    if optimizer.momentum and optimizer.momentum_where == "replica":
        return found._replace(momentum=0.0, decay=found.decay / (1 - found.momentum))
    return found


class ImageCounts(NamedTuple):
    """Images whose gradients are in a step: of pushes that begin in it, of all with a part in it, of those that end."""

    begun: int
    present: int
    ended: int


class BatchCounts(NamedTuple):
    """Batches before a step, and those that begin in it and have a part in it; an image is a fraction of a batch."""

    before: float
    begun: float
    present: float
