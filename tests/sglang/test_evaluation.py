"""`trackway evaluate URL` of a real SGLang."""

from tests.servers.evaluation import *  # noqa: F403
from tests.sglang.sglang_runs import MARKS

pytestmark = MARKS
