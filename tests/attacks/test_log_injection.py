"""What a caller writes into a name cannot forge a line of a service's log, nor colour it."""

import io
import logging

import pytest

from tests.waiting import async_until
from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings

pytestmark = pytest.mark.anyio

FORGED = "mine\n2026-01-01 00:00:00 INFO admin logged in\x1b[2J\x1b[31m\u2028x"


async def test_a_session_id_with_newlines_and_ansi_is_one_escaped_line(running) -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    settings = ToolsSettings.model_validate({"instance_ttl_s": 0.1, "reap_interval_s": 0.05})
    logging.getLogger("trackway.tools").addHandler(handler)
    try:
        async with running(create_app(settings)) as client:
            body = {"tool": "calc_gsm8k_reward", "session_id": FORGED, "create_kwargs": {"ground_truth": "1"}}
            assert (await client.post("/instances", json=body)).status_code == 201
            await async_until(lambda: "expired" in written.getvalue())
    finally:
        logging.getLogger("trackway.tools").removeHandler(handler)

    [line] = written.getvalue().splitlines()
    assert "mine\\n2026-01-01 00:00:00 INFO admin logged in\\x1b[2J\\x1b[31m\\u2028x" in line
    assert line.isprintable()
