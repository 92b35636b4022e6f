"""A job on machines that are not at hand, event by event: what it would do in a second, and how stale its pushes."""
