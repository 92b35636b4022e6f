"""What people see of a run: statistics of all ranks, metrics, progress, the live view and the timeline."""
