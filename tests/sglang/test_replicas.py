"""A second SGLang: two replicas on one store, the way back to the base's weights, and a death."""

from tests.servers.replicas import *  # noqa: F403
from tests.sglang.sglang_runs import MARKS

pytestmark = MARKS
