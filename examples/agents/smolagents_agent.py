# /// script
# requires-python = ">=3.11"
# dependencies = ["smolagents[openai]==1.26.0"]
# ///
r"""A ToolCallingAgent of smolagents, which answers with its tool final_answer.

    export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/smolagents_agent.py"]' && trackway up
    trackway train ... actor_rollout_ref.rollout.agent.default_agent_loop=external \
        data.max_prompt_length=4096 actor_rollout_ref.rollout.multi_turn.enable=false
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
