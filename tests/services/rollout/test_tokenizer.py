"""Loading the model's tokenizer."""

import asyncio
import threading
from pathlib import Path

import pytest

from trackway.rollout import service
from trackway.rollout.service import TokenText

pytestmark = pytest.mark.anyio


async def test_a_caller_that_leaves_starts_no_second_load_beside_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, go_on = threading.Event(), threading.Event()
    loading: list[int] = [0]
    most: list[int] = []

    def load(*_: object) -> str:
        loading[0] += 1
        most.append(loading[0])
        begun.set()
        assert go_on.wait(30)
        loading[0] -= 1
        return "tokenizer"

    monkeypatch.setattr(service, "_load_tokenizer", load)
    text = TokenText(Path("model"))
    leaves = asyncio.create_task(text.tokenizer())
    assert await asyncio.to_thread(begun.wait, 30)
    begun.clear()
    leaves.cancel()
    stays = asyncio.create_task(text.tokenizer())
    second_beside_the_first = await asyncio.to_thread(begun.wait, 0.2)
    go_on.set()

    assert (second_beside_the_first, await stays, max(most)) == (False, "tokenizer", 1)
