"""What a job decides about asynchronous training where the configuration leaves it open (auto). Pure."""

from adam_mpi.config import Config

TOTAL_IN_FLIGHT = 10
"""Pushes of all threads together that late gradients do no harm with, at the learning rates that people use."""
LEAST_IN_FLIGHT = 4
"""Pushes of a thread in flight that hide their way to the servers."""
CLIP_NORM = 4.0
"""Largest norm of a gradient without momentum; momentum repeats gradients, and shorter ones are stable then."""
LEAST_CLIP_NORM = 1.0


def decide(config: Config, threads: int, crowded: bool) -> None:
    """Set what the recipe of asynchronous training leaves open in `config`, for `threads` trainer threads in all.

    `crowded`: whether a node has more trainer threads than cores. One thread alone trains sequentially: with the rule
    of the servers, no clipping, and one push in flight.
    """
    alone = trains_alone(config, threads)
    optimizer = config.optimizer
    if optimizer.momentum_where == "auto":
        optimizer.momentum_where = "replica" if _replicas_keep_velocity(config) and not alone else "server"
    clips = config.asynchronous and config.layout.partitions == 1 and optimizer.where == "server"
    if not optimizer.clip_norm and clips and not alone:
        optimizer.clip_norm = max(LEAST_CLIP_NORM, CLIP_NORM * (1 - optimizer.momentum))
    if not config.push.in_flight:
        least = 1 if crowded else LEAST_IN_FLIGHT
        config.push.in_flight = 1 if alone else max(least, TOTAL_IN_FLIGHT // threads)


def trains_alone(config: Config, threads: int) -> bool:
    """Return whether one thread trains alone and without clocks: the recipe then takes the steps one by one."""
    return config.asynchronous and config.layout.partitions == 1 and threads == 1


def _replicas_keep_velocity(config: Config) -> bool:
    """Return whether the recipe may keep the velocity in trainer threads: whole networks, no waiting."""
    optimizer = config.optimizer
    moves = optimizer.kind in ("momentum", "nesterov") and optimizer.momentum > 0 and optimizer.where == "server"
    return moves and config.asynchronous and config.layout.partitions == 1 and config.push.protocol != "factor"
