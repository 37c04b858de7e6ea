# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
r"""An agent of pydantic-ai, which calls the model by Responses.

    export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/pydantic_ai_agent.py"]' && trackway up
    trackway train --config-name tiny_demo actor_rollout_ref.rollout.multi_turn.enable=false \
        actor_rollout_ref.rollout.agent.default_agent_loop=external
"""

import json
import sys

from pydantic_ai import Agent, UsageLimits

agent = Agent("openai:policy")


@agent.tool_plain
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    if "**" in expression or set(expression) - set("0123456789+-*/(). "):
        return "expected numbers and + - * / ( )"
    try:
        return str(eval(expression))
    except (SyntaxError, ArithmeticError, TypeError) as error:
        return str(error)


question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
print(agent.run_sync(question, usage_limits=UsageLimits(request_limit=4)).output)
