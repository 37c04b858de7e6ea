"""What waits on disk for MLflow or Weave, and how it is sent: metrics, the run's end, feedback on traces.

Imported by `traces` and `tracking`. Every request can be repeated without doing its work twice.
"""
