"""Guided sampling by a real SGLang."""

from tests.servers.structured_outputs import *  # noqa: F403
from tests.sglang.sglang_runs import MARKS

pytestmark = MARKS
