"""Metrics of a step as pure functions of trajectories and times, under verl's names."""
