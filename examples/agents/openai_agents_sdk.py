# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
r"""An agent of the OpenAI Agents SDK, which calls the model by Responses; its tracing to OpenAI is switched off.

export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/openai_agents_sdk.py"]' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import json
import sys

from agents import Agent, MaxTurnsExceeded, ModelBehaviorError, Runner, function_tool


@function_tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    if "**" in expression or set(expression) - set("0123456789+-*/(). "):
        return "expected numbers and + - * / ( )"
    return str(eval(expression))  # the SDK shows an exception to the model


messages = json.load(sys.stdin)["prompt"]
agent = Agent(name="solver", model="policy", tools=[calculator])
try:
    print(Runner.run_sync(agent, messages, max_turns=4).final_output)
except (MaxTurnsExceeded, ModelBehaviorError) as error:  # the model's own fault: the rollout counts
    print(error)
