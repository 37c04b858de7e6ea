# /// script
# requires-python = ">=3.11"
# dependencies = ["pydantic-ai-slim[openai]==2.68.0"]
# ///
r"""An agent of pydantic-ai, which calls the model by Responses.

export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/pydantic_ai_agent.py"]' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import json
import sys

from pydantic_ai import Agent, UnexpectedModelBehavior, UsageLimitExceeded, UsageLimits

agent = Agent("openai:policy", retries=3)


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
try:
    print(agent.run_sync(question, usage_limits=UsageLimits(request_limit=4)).output)
except (UnexpectedModelBehavior, UsageLimitExceeded) as error:  # the model's own fault: the rollout counts
    print(error)
