"""`trackway evaluate URL` of a real vLLM."""

import asyncio
from pathlib import Path

import pytest

from tests.servers.evaluation import *  # noqa: F403
from tests.servers.evaluation import evaluated
from tests.vllm.vllm_runs import MARKS
from trackway.system.process import UserError

pytestmark = [*MARKS, pytest.mark.extended]


async def test_a_model_that_the_server_does_not_have_is_refused(url: str, rows: Path) -> None:
    """SGLang answers under any name."""
    with pytest.raises(UserError, match=r"--model: expected a model of .* \(policy\), got nothing; name one of them"):
        await asyncio.to_thread(evaluated, url, rows, model="nothing")
