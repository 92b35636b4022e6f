"""Executors: what computes a graph, on flat weight and gradient vectors."""
