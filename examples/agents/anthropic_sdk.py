# /// script
# requires-python = ">=3.11"
# dependencies = ["anthropic==2.12.0"]
# ///
r"""An agent that only knows Anthropic's SDK: answers a question with a calculator.

export TRACKWAY_EXTERNAL__COMMAND='["uv", "run", "examples/agents/anthropic_sdk.py"]' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import json
import sys

from anthropic import Anthropic

SCHEMA = {"type": "object", "properties": {"expression": {"type": "string"}}}


def calculate(arguments: dict[str, str]) -> str:
    try:
        expression = arguments["expression"]
        if "**" in expression or set(expression) - set("0123456789+-*/(). "):
            return "expected numbers and + - * / ( )"
        return str(eval(expression))
    except Exception as error:  # whatever the model wrote; it is shown to the model
        return str(error)


client, messages = Anthropic(), json.load(sys.stdin)["prompt"]  # the base URL and the key are the session's
for _ in range(4):
    tools = [{"name": "calculator", "input_schema": SCHEMA}]
    reply = client.messages.create(model="policy", max_tokens=512, messages=messages, tools=tools)
    messages.append({"role": "assistant", "content": reply.content})
    calls = [block for block in reply.content if block.type == "tool_use"]
    if not calls:
        break
    content = [{"type": "tool_result", "tool_use_id": call.id, "content": calculate(call.input)} for call in calls]
    messages.append({"role": "user", "content": content})
