r"""An agent that only knows OpenAI's SDK: answers a question with a calculator.

export TRACKWAY_EXTERNAL__COMMAND='["python", "examples/agents/openai_script.py"]' && trackway up
trackway data make-tiny rows --agent-name external
trackway train --config-name tiny_demo data.train_files=$PWD/rows/train.parquet data.val_files=$PWD/rows/test.parquet
"""

import json
import sys
from typing import Any

from openai import OpenAI

PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}}
TOOLS: list[Any] = [{"type": "function", "function": {"name": "calculator", "parameters": PARAMETERS}}]


def calculate(arguments: str) -> str:
    try:
        expression = json.loads(arguments)["expression"]
        if "**" in expression or set(expression) - set("0123456789+-*/(). "):
            return "expected numbers and + - * / ( )"
        return str(eval(expression))
    except Exception as error:  # whatever the model wrote; it is shown to the model
        return str(error)


client, messages = OpenAI(), json.load(sys.stdin)["prompt"]  # OPENAI_BASE_URL and OPENAI_API_KEY are the session's
for _ in range(4):
    message = client.chat.completions.create(model="policy", messages=messages, tools=TOOLS).choices[0].message
    messages.append(message.model_dump(exclude_none=True))
    if not message.tool_calls:
        break
    for call in message.tool_calls:
        assert call.type == "function"
        result = {"role": "tool", "tool_call_id": call.id, "content": calculate(call.function.arguments)}
        messages.append(result)
