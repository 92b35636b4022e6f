"""Data sets and their formats, the order of batches, and the data rank that loads and serves them."""
