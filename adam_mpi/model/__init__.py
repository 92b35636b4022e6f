"""Layers and their shapes, the flat parameter vector, partitions into strips, and the engines that compute a network."""
