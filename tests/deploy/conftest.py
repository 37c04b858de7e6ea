"""What tests of the deployment share."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def collector() -> Iterator[None]:
    """A port changes the garbage collector of its process; this one is the suite's."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)
