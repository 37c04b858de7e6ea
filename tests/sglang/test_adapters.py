"""Adapters in a real SGLang."""

from tests.servers.adapters import *  # noqa: F403
from tests.sglang.sglang_runs import MARKS

pytestmark = MARKS
