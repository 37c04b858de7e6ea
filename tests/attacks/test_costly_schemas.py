"""A tool's own schema bounds no work, so its patterns and `uniqueItems` must be cheap whatever the arguments are."""

import json
from collections.abc import Iterator

import pytest
from pydantic import JsonValue

from tests.attacks.costs import Meter
from tests.attacks.service_process import service_process
from tests.time_limits import slowness

pytestmark = pytest.mark.slow

CPU_S, HEALTH_S = 2.0, 1.0
REPEATED = "a" * 40 + "!"


@pytest.fixture(scope="module")
def meter(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Meter]:
    settings = {"extra_tools": '["tests.attacks.costly_schemas:Costly"]', "tools": '["calculator"]'}
    with service_process("tools", tmp_path_factory.mktemp("tools"), settings) as service:
        yield Meter(service)


@pytest.mark.parametrize(
    ("arguments", "status"),
    [
        ({"text": REPEATED}, 422),
        ({"looking": REPEATED}, 422),
        ({REPEATED: 1}, 422),
        ({"text": "a" * 16_000_000 + "!"}, 422),
        ({"values": [{"a": number} for number in range(45_000)]}, 200),
        ({"values": [*range(200_000), *map(str, range(200_000))]}, 200),
        ({"values": [*range(200_000), *map(str, range(200_000)), 0]}, 422),
    ],
    ids=["text", "look-ahead", "name", "long text", "objects", "numbers and texts", "one twice"],
)
def test_arguments_cost_little_to_validate(meter: Meter, arguments: dict[str, JsonValue], status: int) -> None:
    cost = meter.post("/tools/costly/execute", json.dumps({"arguments": arguments}).encode())

    slow = slowness()
    assert (cost.status, cost.cpu_s <= CPU_S * slow, cost.health_cpu_s <= HEALTH_S * slow) == (status, True, True), cost
