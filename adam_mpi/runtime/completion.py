"""The end of a job whose phases are over: servers finish, the results are written, all ranks end."""

from functools import partial
from typing import Any

from adam_mpi.base.errors import LostState, UserError
from adam_mpi.checkpoint.disk_task import DiskTask, disk_seconds, reason
from adam_mpi.cluster.control_messages import ControlChannel, FinishServer, JobOver
from adam_mpi.runtime.checkpoint_manager import CheckpointManager
from adam_mpi.runtime.job import DONE, STOPPED, CoordinatorResources
from adam_mpi.runtime.job_report import JobReport
from adam_mpi.runtime.supervision import DISK_SECONDS, send_to_all


class Completion:
    """Ends a job step by step; `resources` keep the writing of the results if a rank is lost meanwhile."""

    def __init__(
        self,
        channel: ControlChannel,
        report: JobReport,
        checkpoints: CheckpointManager,
        resources: CoordinatorResources,
    ) -> None:
        self.channel = channel
        self.report = report
        self.checkpoints = checkpoints
        self.resources = resources
        self.servers_finishing = False
        """Whether the servers have been ordered to finish."""
        self.finished = False

    def step(self) -> bool:
        """Do the next step of the job's completion if it is possible; return whether one was done.

        Raise LostState if the weights lack acknowledged pushes, UserError if the results could not be written.
        """
        if self.finished or not self._workers_finished() or not self.checkpoints.finished():
            return False
        if not self.servers_finishing:
            self._finish_servers()
            return True
        if not self._servers_finished():
            return False
        if self.resources.results_task is None:
            self.resources.results_task = self._start_writing()
        if not self.resources.results_task.over:
            return False
        self._show_results(self.resources.results_task)
        send_to_all(self.channel, self.report.world, JobOver())
        self.finished = True
        return True

    def _workers_finished(self) -> bool:
        """Return whether all workers have sent their final reports, so that servers can complete."""
        return self._final_reports("worker") == len(self.report.world.layout.workers)

    def _servers_finished(self) -> bool:
        """Return whether all servers have sent their final reports, so that results can be written."""
        return self._final_reports("server") >= len(self.report.world.layout.servers)

    def _final_reports(self, role: str) -> int:
        """Return how many ranks have sent the final report of `role` at the completion of the job."""
        return self.report.statistics.count_finals(role, self.report.members)

    def _finish_servers(self) -> None:
        """Let the servers complete their stores and send their last statistics."""
        self.servers_finishing = True
        conserve = self.report.world.config.inject.conserve
        copies = str(self.report.job.directory / "conservation") if conserve else None
        for rank in self.report.world.layout.servers:
            self.channel.send(FinishServer(copies), rank)

    def _start_writing(self) -> DiskTask[None]:
        """Begin to write the results of a completed job whose weights have all acknowledged pushes."""
        self.check_weights()
        stopped = bool(self.report.record.stopped_by)
        if not stopped:
            self.report.check_outcome()
            self.report.record.results["warnings"] = self.report.warnings()
        summary = self.report.summary("stopped" if stopped else "done")
        seconds = disk_seconds(self.report.world.config)
        return DiskTask("results", partial(self.write_results, summary), seconds)

    def check_weights(self) -> None:
        """Raise LostState if a shard lacks a push that its pusher counts as acknowledged."""
        missing = self.report.statistics.short(self.report.members, self.report.judged_pushers)
        if missing:
            counts = ", ".join(f"{count} of rank {pusher}" for pusher, count in sorted(missing.items()))
            raise LostState(f"acknowledged pushes are not in all weights: {counts}; the job is not done")

    def write_results(self, summary: dict[str, Any]) -> None:
        """Write weights and `summary` of the completed job, then the marker DONE or STOPPED."""
        owner = self.checkpoints.owner
        owner.check()
        self.resources.status_writer.forget("summary.json")
        self.resources.status_writer.wait_until_written(DISK_SECONDS)
        stopped_by = self.report.record.stopped_by
        if not stopped_by:
            self.checkpoints.write_weights()
        self.report.write_summary(summary)
        # Writing the weights may have taken longer than an owner may be silent.
        owner.check()
        directory = self.report.job.directory
        if stopped_by:
            (directory / STOPPED).write_text(f"{stopped_by}\n")
        else:
            (directory / DONE).write_text("")

    def _show_results(self, task: DiskTask[None]) -> None:
        """Show how the completed job ended; raise UserError if its results could not be written."""
        progress = self.report.progress
        progress.close()
        try:
            task.result()
        except (OSError, RuntimeError) as error:
            # HDF5 raises RuntimeError for some errors of the disk.
            raise UserError(f"the results could not be written: {reason(error)}; make room and --resume") from None
        if self.report.record.stopped_by:
            stopped_by = self.report.record.stopped_by
            progress.say(f"stopped by {stopped_by}; continue with --run {self.report.job.directory} --resume")
        else:
            self.report.say_result()
