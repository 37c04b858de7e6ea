"""Blocking code in threads."""

import asyncio
import sys

import pytest

from trackway.serving.user_code import UserCodeExit
from trackway.tools import in_thread

pytestmark = pytest.mark.anyio


def cancels_itself() -> None:
    raise asyncio.CancelledError


async def test_code_that_exits_in_a_thread_fails_and_leaves_the_loop_alone() -> None:
    with pytest.raises(UserCodeExit, match=r"^it called sys.exit\(3\)$"):
        await in_thread(lambda: sys.exit(3))
    with pytest.raises(UserCodeExit, match=r"^it cancelled itself$"):
        await in_thread(cancels_itself)
    assert await in_thread(lambda: 4) == 4
