"""A real vLLM classifies."""

import pytest

from tests.servers.classification import *  # noqa: F403
from tests.vllm.vllm_runs import MARKS

pytestmark = [*MARKS, pytest.mark.extended]
