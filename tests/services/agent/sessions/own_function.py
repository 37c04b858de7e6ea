"""Agents as functions."""

import sys
import threading

from openai import AsyncOpenAI

from trackway.wire.agent import Sample
from trackway.wire.sessions import SessionAccess

import_gate = threading.Event()
"""Lets the import of `slow_import` go on."""


async def answer(access: SessionAccess, sample: Sample) -> float:
    """Asks the model once, and scores the answer 0.5."""
    async with AsyncOpenAI(base_url=access.base_url, api_key=access.api_key) as client:
        await client.chat.completions.create(
            model="policy", messages=[{"role": "user", "content": sample.prompt[0].content}]
        )
    return 0.5


def says_text(access: SessionAccess, sample: Sample) -> str:
    """Returns no number."""
    return "good"


def leaves(access: SessionAccess, sample: Sample) -> None:
    """Ends the process, as a script does."""
    sys.exit(3)
