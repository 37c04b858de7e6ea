"""Generation by a real SGLang: stops, streams, bounds, cuts, pauses."""

from tests.servers.generation import *  # noqa: F403
from tests.sglang.sglang_runs import MARKS

pytestmark = MARKS
