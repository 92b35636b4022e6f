"""Sweep over values of a configuration: the runs and their jobs (jobs.py), the results (table.py)."""
