"""Limits in time that tests share."""

import pytest

ENDS_SOON = pytest.mark.timeout(30, func_only=True)
"""For a test of a deadline, which would otherwise pass when the deadline comes a minute late."""
