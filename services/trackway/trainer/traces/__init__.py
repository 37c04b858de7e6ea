"""A run's traces: how many trajectories are traced, the trainer's own spans, feedback, counts of spans.

Sending is in `delivery` and in `trackway.tracing.export`.
"""
