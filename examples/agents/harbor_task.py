r"""A Harbor task for each rollout: Harbor runs its agent against the session, and its verifier's reward is the score.

    uv tool install harbor==0.25.0
    export TRACKWAY_EXTERNAL__FUNCTION=harbor_task:run PYTHONPATH=$PWD/examples/agents MODEL=$HOME/models/Qwen3-8B
    trackway up --model-path $MODEL && trackway train --config-name grpo actor_rollout_ref.model.path=$MODEL \
        data.train_files=$PWD/tasks.jsonl data.max_prompt_length=32768 data.train_batch_size=256

Rows have `"agent_name": "external"` and `"extra_info": {"index": 0, "task": "/path/to/a/task"}`.
Tasks run in Docker; HARBOR_ENV names another of Harbor's environments, or a class of yours as `module:Class`.
"""

import asyncio
import json
import os
import signal
import tempfile
from pathlib import Path

from trackway.wire.agent import Sample
from trackway.wire.sessions import SessionAccess


async def run(access: SessionAccess, sample: Sample) -> float:
    """The reward of one trial."""
    with tempfile.TemporaryDirectory() as folder:
        place = ["--env", os.environ.get("HARBOR_ENV", "docker"), "--trials-dir", folder]
        agent = ["--agent", "terminus-2", "--model", "openai/policy", "--agent-kwarg", f"api_base={access.base_url}"]
        command = ["harbor", "trials", "start", "--path", str(sample.extra_info["task"]), *place, *agent]
        harbor = await asyncio.create_subprocess_exec(*command, env={**os.environ, "OPENAI_API_KEY": access.api_key})
        try:
            await harbor.wait()
        except asyncio.CancelledError:  # the time is over; Harbor stops its environment
            harbor.send_signal(signal.SIGINT)
            await asyncio.wait_for(harbor.wait(), 20)
            raise
        [trial] = [json.loads(result.read_text()) for result in Path(folder).glob("*/result.json")]
        if trial["verifier_result"] is None:
            raise RuntimeError(f"expected a reward of Harbor's verifier, got {trial['exception_info']}")
        return float(trial["verifier_result"]["rewards"]["reward"])
