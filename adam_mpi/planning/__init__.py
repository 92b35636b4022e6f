"""The plan of a job: how a model is partitioned and placed, what memory that takes, and all that as text."""
