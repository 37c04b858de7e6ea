"""The rollout service over a real SGLang."""

from tests.servers.service import *  # noqa: F403
from tests.sglang.sglang_runs import MARKS

pytestmark = MARKS
