"""Guided sampling by a real vLLM."""

from tests.servers.structured_outputs import *  # noqa: F403
from tests.vllm.vllm_runs import MARKS

pytestmark = MARKS
