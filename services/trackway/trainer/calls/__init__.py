"""A run that is driven by calls instead of the fit loop: the caller's own loop computes gradients and takes steps.

The service appends each request to the run's log before it acknowledges it. The run's process executes the log and
writes the results. Nothing that was acknowledged is lost with either of them.
"""
