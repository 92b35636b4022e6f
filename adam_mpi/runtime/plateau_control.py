"""The coordinator's part of the schedule plateau: follow validation losses, and change the rate of all servers."""

import logging

from adam_mpi.cluster.control_messages import ControlChannel, SetRateScale
from adam_mpi.cluster.world import World
from adam_mpi.config import Optimizer
from adam_mpi.monitor.job_statistics import JobStatistics
from adam_mpi.optimizer.schedules import Plateau

log = logging.getLogger(__name__)


class PlateauControl:
    """Reduces the rate between two phases, when nothing is pushed: every server takes each step at the same rate."""

    def __init__(self, world: World, channel: ControlChannel, statistics: JobStatistics, plateau: Plateau) -> None:
        """Continue from `plateau`, whose scale all servers have when a generation begins."""
        self.world = world
        self.channel = channel
        self.statistics = statistics
        self.plateau = plateau
        self.changing = False
        """Whether servers have been ordered to change the rate."""

    @property
    def optimizer(self) -> Optimizer:
        """Return the configuration of the optimizer with the schedule plateau."""
        return self.world.config.optimizer

    def validated(self, loss: float) -> None:
        """Note the `loss` of a validation phase for the plateau; order all servers to change the rate if due."""
        if self.optimizer.schedule != "plateau":
            return
        before = self.plateau.scale
        self.plateau = self.plateau.after(loss, self.optimizer)
        if self.plateau.scale == before:
            return
        self.changing = True
        log.info("no better validation loss than %.4g: the rate is multiplied by %g", loss, self.plateau.scale / before)
        for rank in self.world.layout.servers:
            self.channel.send(SetRateScale(self.plateau.scale), rank)

    @property
    def settled(self) -> bool:
        """Return whether all servers have the learning rate of this state of the plateau."""
        if self.changing:
            members = {self.world.layout.places[rank].member for rank in self.world.layout.servers}
            scales = [report["rate_scale"] for report in self.statistics.of_role("server") if report["rank"] in members]
            self.changing = any(scale != self.plateau.scale for scale in scales)
        return not self.changing
