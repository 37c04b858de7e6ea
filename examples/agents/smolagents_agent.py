# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
r"""A ToolCallingAgent of smolagents, which answers with its tool final_answer.

    export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/smolagents_agent.py"]'
    MODEL=$HOME/models/Qwen2.5-3B-Instruct
    trackway up --model-path $MODEL && trackway data make-tiny rows --agent-name external
    trackway train --config-name grpo actor_rollout_ref.model.path=$MODEL data.max_prompt_length=4096 \
        data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet \
        data.train_batch_size=64 actor_rollout_ref.actor.ppo_mini_batch_size=64
"""

import json
import os
import sys

from smolagents import OpenAIModel, ToolCallingAgent, tool


@tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression.

    Args:
        expression: numbers, + - * / and brackets
    """
    if "**" in expression or set(expression) - set("0123456789+-*/(). "):
        return "expected numbers and + - * / ( )"
    return str(eval(expression))  # smolagents shows an exception to the model


model = OpenAIModel("policy", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
print(ToolCallingAgent(tools=[calculator], model=model, max_steps=4).run(question))
