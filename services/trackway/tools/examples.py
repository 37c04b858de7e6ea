"""What /docs shows beside each route: requests that work as they stand, and the answers they get."""

from pydantic import JsonValue

Answer = dict[int | str, dict[str, object]]

CREATE: dict[str, JsonValue] = {
    "tool": "calc_gsm8k_reward",
    "session_id": "gsm8k-demo/1/17/0",
    "create_kwargs": {"ground_truth": "72"},
}
EXECUTE: dict[str, JsonValue] = {"arguments": {"answer": "72"}, "tool_call_id": "call_0"}
ONE_SHOT: dict[str, JsonValue] = {"arguments": {"expression": "(84 + 16) / 4"}}

CREATED: JsonValue = {
    "instance_id": "replica0-81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f",
    "tool": "calc_gsm8k_reward",
}
EXECUTED: JsonValue = {"text": "Current parsed answer='72' reward=1.0", "reward": 0.0, "metrics": {}}
CALCULATED: JsonValue = {"text": "25", "reward": 0.0, "metrics": {"instance_reward": 0.0}}
REWARD: JsonValue = {"reward": 1.0}
TOOLS: JsonValue = {
    "tools": [
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Evaluate an arithmetic expression and return its value.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "Numbers and operators"}},
                    "required": ["expression"],
                },
            },
        }
    ],
    "stateless": ["calculator"],
}


def answer(status: int, example: JsonValue) -> Answer:
    """FastAPI's `responses` for one status with one example."""
    return {status: {"content": {"application/json": {"example": example}}}}
