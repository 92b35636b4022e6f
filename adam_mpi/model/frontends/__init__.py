"""Front ends: what users write, turned into a graph."""
