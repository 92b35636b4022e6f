"""Sweep over values of a configuration: the runs (points.py), their jobs (jobs.py), the results (table.py)."""
