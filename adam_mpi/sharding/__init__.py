"""Shards of the parameters: how they are cut, placed, laid out in memory, encoded and counted. Pure: no MPI."""
