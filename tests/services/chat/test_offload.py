import asyncio

import pytest

from trackway.chat.tokenizer import offload


@pytest.mark.anyio
@pytest.mark.parametrize(("size", "inline"), [(10, True), (1_000_000, False)])
async def test_large_work_leaves_the_event_loop(size: int, inline: bool) -> None:
    def has_loop() -> bool:
        try:
            return asyncio.get_running_loop() is not None
        except RuntimeError:
            return False

    assert await offload(size, has_loop) is inline
