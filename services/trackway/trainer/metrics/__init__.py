"""Metrics of a step as pure functions of trajectories and timings, under verl's names."""
