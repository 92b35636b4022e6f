"""Layers and their shapes, the flat parameter vector, partitions into strips, and both engines that run a network."""
