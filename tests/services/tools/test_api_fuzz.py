"""schemathesis calls every documented route with what its schema allows, and with what it does not."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from schemathesis import Case, Response
from schemathesis.config import SchemathesisConfig

from tests.serving import served_in_thread
from trackway.tools.app import create_app
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.builtin.search import SearchTool
from trackway.tools.settings import ToolsSettings

pytestmark = pytest.mark.slow

SLOW_OR_LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
bounded = settings(max_examples=30, derandomize=True, deadline=None, suppress_health_check=SLOW_OR_LARGE)


def app_over(documents: Path) -> FastAPI:
    """Every built-in tool that needs no isolation."""
    search = SearchTool.default({"documents": str(documents)})
    return create_app(ToolsSettings(), [CalculatorTool.default(), Gsm8kTool.default(), search])


CONFIG = SchemathesisConfig.from_dict(
    {
        "checks": {"negative_data_rejection": {"expected-statuses": ["4xx"]}},  # 413 is a refusal too
        "operations": [
            # What the tool's own schema says of its arguments, or that lists are of one length, no OpenAPI schema says.
            {"include-operation-id": name, "checks": {"positive_data_acceptance": {"enabled": False}}}
            for name in ("create_instance", "execute_instance", "execute_tool", "get_observation")
        ],
    }
)
schema = schemathesis.openapi.from_dict(app_over(Path("documents")).openapi(), config=CONFIG)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("documents")
    (folder / "paris.md").write_text("# Paris\n\nParis is the capital of France.\n")
    with served_in_thread(app_over(folder), log_level="critical") as url:
        yield url


@schema.parametrize()
@bounded
def test_no_request_finds_a_500_or_an_answer_that_is_not_documented(case: Case, url: str) -> None:
    case.call_and_validate(base_url=url)


def test_no_sequence_of_requests_along_the_links_finds_one_either(url: str) -> None:
    seen: set[tuple[str, int]] = set()

    class Machine(schema.as_state_machine()):
        def get_call_kwargs(self, case: Case) -> dict[str, str]:
            return {"base_url": url}

        def before_call(self, case: Case) -> None:
            if case.operation.label == "POST /instances" and case.meta.generation.mode.is_positive:
                case.body = {"tool": "calc_gsm8k_reward", "create_kwargs": {"ground_truth": "72"}}
            elif "/execute" in case.operation.path and case.meta.generation.mode.is_positive:
                case.body = {"arguments": {"answer": "72"}}

        def after_call(self, response: Response, case: Case) -> None:
            seen.add((case.operation.label, response.status_code))

    run_state_machine_as_test(Machine, settings=settings(bounded, stateful_step_count=10))

    of_instance = "/instances/{instance_id}"
    assert {
        ("POST /instances", 201),
        (f"POST {of_instance}/execute", 200),
        (f"POST {of_instance}/execute", 422),
    } <= seen
    assert {(f"POST {of_instance}/reward", 200), (f"DELETE {of_instance}", 204)} <= seen
