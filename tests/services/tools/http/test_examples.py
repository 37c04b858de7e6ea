"""The files in examples/tools run as they stand."""

import os
import sys
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from trackway.clients.tools import ToolsClient
from trackway.tools.app import create_app
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.loading import load_tools
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import TrackwayError
from trackway.wire.tools import ExecuteRequest, OneShotRequest

pytestmark = [pytest.mark.slow, pytest.mark.anyio]

Running = Callable[[FastAPI], AbstractAsyncContextManager[httpx.AsyncClient]]

EXAMPLES = Path(__file__).parents[4] / "examples"


@pytest.mark.parametrize("folder", ["tools", "sglang_multiturn/config/tool_config"])
def test_the_gsm8k_config_gives_our_tool_with_verls_words(folder: str) -> None:
    (tool,) = load_tools([], [], {}, tool_config_path=EXAMPLES / folder / "gsm8k_tool_config.yaml")

    assert isinstance(tool, Gsm8kTool)
    assert tool.tool_schema == Gsm8kTool.default_schema


async def test_the_functions_take_dates_and_models(running: Running) -> None:
    settings = ToolsSettings(function_tool_path=EXAMPLES / "tools" / "function_tools.py")
    stay = {"city": "Oslo", "arrival": "2026-05-01", "nights": 3}
    async with running(create_app(settings)) as http:
        client = ToolsClient("http://tools", http)
        price = await client.one_shot("trip_price", OneShotRequest(arguments={"stays": [stay], "season": "high"}))
        days = OneShotRequest(arguments={"start": "2026-05-01", "end": "2026-05-04"})
        counted = await client.one_shot("days_between", days)
        with pytest.raises(TrackwayError, match="swap them"):
            await client.one_shot(
                "days_between", OneShotRequest(arguments={"start": "2026-05-02", "end": "2026-05-01"})
            )

    assert (price.text, counted.text, counted.metrics["days"]) == ('{"total":480.0}', "3", 3.0)


async def test_the_game_keeps_its_state_and_rewards_the_whole_life(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES / "tools"))
    settings = ToolsSettings(
        extra_tools=["guess_number:GuessNumberTool"], tool_config={"guess_number": {"penalty": 0.25}}
    )
    async with running(create_app(settings)) as http:
        client = ToolsClient("http://tools", http)
        made = await client.create("guess_number", "run/1/0/0", {"secret": 40})
        guesses = [ExecuteRequest(arguments={"number": number}) for number in (50, 30, 40)]
        texts = [(await client.execute(made.instance_id, guess)).text for guess in guesses]
        reward = await client.reward(made.instance_id)
        await client.release(made.instance_id)

    assert (texts, reward) == (["lower", "higher", "right"], 0.5)


async def test_the_mcp_servers_tools_share_the_trajectorys_shelf(
    running: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(EXAMPLES.parent)
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
    settings = ToolsSettings(tool_config_path=EXAMPLES / "tools" / "mcp_tool_config.yaml")
    async with running(create_app(settings)) as http:
        client = ToolsClient("http://tools", http)
        put, take = [(await client.create(tool, "run/1/0/0")).instance_id for tool in ("put", "take")]
        kept = await client.execute(put, ExecuteRequest(arguments={"name": "a", "text": "an apple"}))
        taken = await client.execute(take, ExecuteRequest(arguments={"name": "a"}))

    assert (kept.text, taken.text) == ("1 on the shelf", "an apple")
