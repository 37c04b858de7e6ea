# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
r"""A CodeAgent of smolagents, which writes Python and answers with its function final_answer.

    export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/smolagents_code_agent.py"]'
    MODEL=$HOME/models/Qwen2.5-3B-Instruct
    trackway up --model-path $MODEL && trackway data make-tiny rows --agent-name external
    trackway train --config-name grpo actor_rollout_ref.model.path=$MODEL data.max_prompt_length=16384 \
        data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet \
        data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64
"""

import json
import os
import sys

from smolagents import CodeAgent, OpenAIModel

model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
print(CodeAgent(tools=[], model=model, max_steps=4).run(question))
