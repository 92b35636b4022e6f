"""What a run lets people see: logs per rank, metrics, progress, and the summary."""
