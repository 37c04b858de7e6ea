"""Exit statuses of a run's process, read by its supervisor."""

EXIT_FAILED = 3
"""The run has FAILED. A restart would fail again."""
EXIT_LOST = 4
"""Another process owns the run."""
EXIT_STORAGE = 5
"""The disk is full or cannot be written. The run can be resumed."""
