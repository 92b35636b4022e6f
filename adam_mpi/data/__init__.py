"""Data sets and their formats, the order of batches, the serving rank and the worker's client."""
