"""A body of 16 MB, whatever its shape, costs a service little, and its answer to a mistake is short.

At most 2 s of CPU, 100 MB of memory beyond the body's own size, 64 kB of answer, and 1 s of CPU at a time, so that
`/health` answers meanwhile.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from tests.attacks.costs import Cost, Meter
from tests.attacks.hostile_bodies import HOSTILE, SIZE
from tests.attacks.service_process import service_process
from tests.time_limits import slowness
from trackway.deploy.bundled import TINY_MODEL

pytestmark = pytest.mark.slow

CHECKPOINT = str(TINY_MODEL)
CPU_S, MEMORY_MIB, ANSWER_BYTES, HEALTH_S = 2.0, 100.0, 65_536, 1.0
HERE = "@"
"""Where the hostile value goes."""

SAMPLED = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
"""Spans are recorded, with what they show of the request."""
UNREACHABLE = {"tracing__backends": '["otlp"]', "tracing__otlp_endpoint": "http://127.0.0.1:9"}
SAMPLE = {"data_source": "openai/gsm8k", "prompt": [{"role": "user", "content": "1+1?"}]}
GROUP = {"run": "r", "experiment_name": "e", "step": 1, "limits": {"timeout_s": 5}}
TRUTH = {"reward_model": {"ground_truth": "2"}}
CALL = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
CHAT = [{"role": "user", "content": "1+1?"}]
SCORE = {"data_source": "openai/gsm8k", "ground_truth": "2", "solution_str": "#### 2"}

SETTINGS: dict[str, dict[str, str]] = {
    "rollout": {"model_path": CHECKPOINT, "device": "cpu"},
    "agent": {"model_path": CHECKPOINT, "base_url": "http://127.0.0.1:9"},
    "tools": {},
    "reward": {},
    "trainer": {},
}

VALUES = ("lists", "objects", "texts", "numbers", "names", "deep lists", "deep objects", "quotes")
MANY = ("many lists", "many texts", "many numbers", "many floats", "many names")
TEXTS = ("words", "one word", "spaces", "wide", "emoji", "escapes", "structure", "digits")
CALLS = ("open calls", "open tags", "calls")
EVERY = (*VALUES, *MANY, "many messages", "long messages", *TEXTS, "number", *CALLS)


class Attack(NamedTuple):
    """Where hostile values go, and which."""

    service: str
    path: str
    body: object
    values: tuple[str, ...]


ATTACKS = [
    Attack("tools", "/tools/calculator/execute", HERE, EVERY),
    Attack("tools", "/tools/calculator/execute", {"arguments": HERE}, ("names", *MANY, "words")),
    Attack("tools", "/tools/calculator/execute", {"arguments": {"expression": HERE}}, (*MANY, *TEXTS)),
    Attack("tools", "/tools/calculator/execute", {"arguments": {}, "create_kwargs": HERE}, ("many names",)),
    Attack("tools", "/get_observation", {"trajectory_ids": ["a"], "actions": HERE}, MANY),
    Attack("tools", "/get_observation", {"trajectory_ids": ["a"], "actions": [HERE]}, (*TEXTS, *CALLS)),
    Attack("tools", "/mcp", HERE, (*VALUES, *MANY, "words")),
    Attack("tools", "/mcp", {**CALL, "params": {"name": "calculator", "arguments": HERE}}, ("names", *MANY)),
    Attack("tools", "/mcp", {**CALL, "params": {"name": HERE}}, ("words", "many lists")),
    Attack("reward", "/score", HERE, ("names", *MANY)),
    Attack("reward", "/score", {**SCORE, "solution_str": HERE}, (*TEXTS, "many lists")),
    Attack("reward", "/score", {**SCORE, "method": "normalized", "ground_truth": HERE}, TEXTS),
    Attack("reward", "/score", {**SCORE, "data_source": HERE}, ("words", "escapes")),
    Attack("trainer", "/runs", {"config": HERE}, ("names", "words", *MANY)),
    Attack("trainer", "/runs", {"config": {"data": {"train_files": HERE}}}, (*MANY, "words")),
    Attack("agent", "/trajectories", HERE, ("names", *MANY)),
    Attack(
        "agent", "/trajectories", {**GROUP, "sample": {**SAMPLE, **TRUTH, "prompt": HERE}}, (*MANY, "long messages")
    ),
    Attack(
        "agent",
        "/trajectories",
        {**GROUP, "sample": {**SAMPLE, **TRUTH, "prompt": [{"role": "user", "content": HERE}]}},
        (*TEXTS, *CALLS),
    ),
    Attack("agent", "/groups", {**GROUP, "n": 64, "sample": {**SAMPLE, **TRUTH, "data_source": HERE}}, ("words",)),
    Attack("rollout", "/generate", HERE, ("names", *MANY)),
    Attack("rollout", "/generate", {"token_ids": HERE}, ("numbers", *MANY)),
    Attack(
        "rollout", "/v1/chat/completions", {"model": "policy", "messages": HERE}, ("many messages", "long messages")
    ),
    Attack("rollout", "/v1/chat/completions", {"model": "policy", "messages": HERE}, MANY),
    Attack(
        "rollout", "/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": HERE}]}, TEXTS
    ),
    Attack("rollout", "/v1/chat/completions", {"model": "policy", "messages": CHAT, "min_p": HERE}, (*MANY, "escapes")),
    Attack("rollout", "/v1/completions", {"model": "policy", "prompt": HERE}, (*TEXTS, *MANY, "long messages")),
    Attack("rollout", "/v1/completions", {"model": "policy", "prompt": HERE, "max_tokens": 1}, ("many numbers",)),
]


@pytest.fixture(scope="module")
def meters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Meter]]:
    """Each service, started when it is first attacked."""
    with ExitStack() as services:

        class Started(dict[str, Meter]):
            def __missing__(self, service: str) -> Meter:
                folder = tmp_path_factory.mktemp(service)
                settings = {**SETTINGS[service], **({"outputs_dir": str(folder)} if service == "trainer" else {})}
                settings |= UNREACHABLE
                process = services.enter_context(service_process(service, folder, settings))
                self[service] = Meter(process)
                self[service].post("/health", b"")
                return self[service]

        yield Started()


@pytest.mark.parametrize(
    "attack", ATTACKS, ids=lambda attack: f"{attack.service}{attack.path} {json.dumps(attack.body)}"
)
def test_a_hostile_body_costs_little(meters: dict[str, Meter], attack: Attack) -> None:
    before, behind = json.dumps(attack.body).encode().split(b'"@"')
    headers = {"accept": "application/json", "traceparent": SAMPLED}
    for name in attack.values:
        body = before + HOSTILE[name](SIZE - len(before) - len(behind)) + behind
        cost = meters[attack.service].post(attack.path, body, headers)
        assert within_limits(cost, len(body), slowness()), f"{name}: {cost.status}, {cost}"


def within_limits(cost: Cost, size: int, slow: float) -> bool:
    return (
        cost.status < 500
        and cost.cpu_s <= CPU_S * slow
        and cost.memory_mib <= MEMORY_MIB + size / 2**20
        and len(cost.answer) <= ANSWER_BYTES
        and cost.health_cpu_s <= HEALTH_S * slow
    )
