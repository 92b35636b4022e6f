"""Simulate a job on machines that are not available, event by event: its throughput and staleness."""
