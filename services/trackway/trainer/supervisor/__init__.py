"""The runs of an outputs folder as the service manages them: start, watch, restart, stop, resume.

Imported by `trainer.app` and by checks before a run. It never computes a step.
"""
