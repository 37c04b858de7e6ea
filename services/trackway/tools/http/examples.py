"""Examples for /docs: requests that work as they stand, and their responses."""

from pydantic import JsonValue

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
CALCULATED: JsonValue = {"text": "25", "reward": 0.0, "metrics": {}, "instance_reward": 0.0}
REWARD: JsonValue = {"reward": 1.0}
INSTANCES: JsonValue = {
    "instances": [
        {
            "instance_id": "replica0-81d2c4aa-6d0f4a1e8b2c4c5d9e7f1a2b3c4d5e6f",
            "tool": "calc_gsm8k_reward",
            "session_id": "gsm8k-demo/1/17/0",
            "state": "idle",
            "age_s": 12.5,
            "idle_s": 3.25,
        }
    ],
    "total": 1,
}
SESSION_RELEASED: JsonValue = {"released": 2, "failed": []}

RETRIEVE: dict[str, JsonValue] = {"queries": ["capital of France"], "topk": 3, "return_scores": True}
RETRIEVED: JsonValue = {
    "result": [
        [{"document": {"id": "paris.md#0", "contents": '"Paris"\nParis is the capital of France.'}, "score": 1.42}]
    ]
}

OBSERVE: dict[str, JsonValue] = {
    "trajectory_ids": ["t-1", "t-2"],
    "actions": [
        '<tool_call>{"name": "calculator", "arguments": {"expression": "(84 + 16) / 4"}}</tool_call>',
        "no call",
    ],
    "extra_fields": [{}, {}],
    "finish": [False, True],
}
OBSERVED: JsonValue = {
    "observations": ["\n<tool_response>\n25\n</tool_response>\n", ""],
    "dones": [False, True],
    "valids": [True, True],
    "processing_time_ms": 0.4,
}
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
