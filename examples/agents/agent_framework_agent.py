# /// script
# requires-python = ">=3.11"
# dependencies = ["agent-framework-core==1.23.0", "agent-framework-openai==1.17.0"]
# ///
r"""An agent of Microsoft's agent-framework, which continues a response by `previous_response_id`.

export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/agent_framework_agent.py"]' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import asyncio
import json
import sys

from agent_framework import Agent, tool
from agent_framework.openai import OpenAIChatClient


@tool(approval_mode="never_require")
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    if "**" in expression or set(expression) - set("0123456789+-*/(). "):
        return "expected numbers and + - * / ( )"
    try:
        return str(eval(expression))
    except (SyntaxError, ArithmeticError, TypeError) as error:
        return str(error)


question = "\n".join(message["content"] for message in json.load(sys.stdin)["prompt"])
print(asyncio.run(Agent(client=OpenAIChatClient(model="policy"), tools=[calculator]).run(question)).text)
