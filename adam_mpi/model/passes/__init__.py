"""Passes: functions from graph to graph."""
