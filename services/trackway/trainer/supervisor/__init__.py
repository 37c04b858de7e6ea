"""Management of the runs in an outputs folder: start, monitor, restart, stop, resume.

Imported by `trainer.app` and by the checks before a run. Training steps run elsewhere, in the worker process.
"""
