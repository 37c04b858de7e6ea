# /// script
# requires-python = ">=3.11"
# dependencies = ["mini-swe-agent==2.4.6", "mcp"]
# ///
r"""mini-swe-agent in a folder of its own: answers with commands of the shell, one in each turn.

    export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/mini_swe_agent.py"]'
    MODEL=$HOME/models/Qwen2.5-3B-Instruct
    trackway up --model-path $MODEL && trackway data make-tiny rows --agent-name external
    trackway train --config-name grpo actor_rollout_ref.model.path=$MODEL data.max_prompt_length=4096 \
        data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet \
        data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64
"""

import json
import os
import sys
import tempfile

os.environ |= {"MSWEA_COST_TRACKING": "ignore_errors", "MSWEA_SILENT_STARTUP": "1"}

from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.litellm_model import LitellmModel

TASK = "{{task}}\nUse bash. Begin the last output with COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT and a new line."
question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
with tempfile.TemporaryDirectory() as folder:
    model = LitellmModel(model_name="openai/policy")
    templates = {"system_template": "You can use a shell.", "instance_template": TASK}
    agent = DefaultAgent(model, LocalEnvironment(cwd=folder), step_limit=8, **templates)
    print(agent.run(question))
