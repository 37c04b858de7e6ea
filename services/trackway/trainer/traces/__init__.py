"""A run's traces: the trace budget, the trainer's own spans, feedback, span counts.

Sending is in `delivery` and in `trackway.tracing.export`.
"""
