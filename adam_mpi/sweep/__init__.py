"""Many runs of one configuration: which they are (points.py), how they run (jobs.py), what comes out (table.py)."""
