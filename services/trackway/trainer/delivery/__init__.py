"""Delivery of metrics, run status and trace feedback to MLflow and Weave, from queues on disk.

Imported by `traces` and `tracking`. All requests are idempotent.
"""
