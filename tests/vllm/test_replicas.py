"""A second vLLM: two replicas on one store, the way back to the base's weights, and a death."""

import pytest

from tests.servers.replicas import *  # noqa: F403
from tests.vllm.vllm_runs import MARKS

pytestmark = [*MARKS, pytest.mark.extended]
