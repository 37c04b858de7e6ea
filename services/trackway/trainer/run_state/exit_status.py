"""Exit statuses of a run's own process, as its supervisor reads them."""

EXIT_FAILED = 3
"""The run has FAILED; starting the process again would not help."""
EXIT_LOST = 4
"""Another process owns the run."""
EXIT_STORAGE = 5
"""The disk took nothing more; the run can be resumed."""
