"""schemathesis calls Tinker's routes with what their schema allows, and with what it does not.

`TRACKWAY_FUZZ_EXAMPLES=200` makes 4,000 requests or more, which `pytest -s` counts.
"""

import os
import re
from collections.abc import Iterator

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.config import SchemathesisConfig

from tests.services.trainer.tinker.conftest import app_of
from tests.services.trainer.tinker.executor import AnsweringRuns
from tests.services.trainer.tinker.test_routes import calling
from tests.serving import served_in_thread
from trackway.trainer.settings import TrainerSettings

pytestmark = pytest.mark.slow

EXAMPLES = int(os.environ.get("TRACKWAY_FUZZ_EXAMPLES", "10"))
SLOW_OR_LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
bounded = settings(max_examples=EXAMPLES, derandomize=True, deadline=None, suppress_health_check=SLOW_OR_LARGE)


@schemathesis.serializer("application/x-protobuf")
def _bytes(context: object, value: object) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogatepass")


def documented() -> dict[str, object]:
    app = app_of(TrainerSettings(), AnsweringRuns(outputs=None))  # type: ignore[arg-type]
    return app.openapi()


CONFIG = SchemathesisConfig.from_dict(
    {
        "checks": {
            "positive_data_acceptance": {"enabled": False},  # ids of nothing, and paths of nothing, are refused
            "negative_data_rejection": {"expected-statuses": ["4xx"]},
        }
    }
)
schema = schemathesis.openapi.from_dict(documented(), config=CONFIG).include(path_regex="^/api/v1/")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, rollout_url: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The API with a session, a model and a sampling session, whose ids the requests use."""
    outputs = tmp_path_factory.mktemp("outputs")
    runs = AnsweringRuns(outputs)
    settings = TrainerSettings(outputs_dir=str(outputs), rollout_url=rollout_url, tinker_max_sessions=100_000)
    with served_in_thread(app_of(settings, runs), log_level="critical") as url, calling(url) as caller:
        session = caller.session()
        model_id, sampler = caller.model(session), caller.sampler(session)
        yield url, {"session_id": session, "model_id": model_id, "sampling_session_id": sampler}
        counts = re.findall(r"^trackway_requests_total\{.* (\d+)", httpx.get(f"{url}/metrics").text, re.MULTILINE)
        print(f"\n{sum(map(int, counts))} requests")
        assert sum(map(int, counts)) >= 4000 or EXAMPLES < 200


@schema.parametrize()
@bounded
def test_no_request_finds_a_500_or_an_undocumented_answer(case: Case, served: tuple[str, dict[str, str]]) -> None:
    url, known = served
    if isinstance(case.body, dict) and case.meta is not None and case.meta.generation.mode.is_positive:
        case.body |= {name: id for name, id in known.items() if isinstance(case.body.get(name), str)}
        case.body |= {"request_id": f"{known['model_id']}:0"} if "request_id" in case.body else {}
    case.call_and_validate(base_url=url)


@pytest.mark.parametrize("place", range(0, 200, 7))
def test_no_damaged_protobuf_finds_a_500(place: int, served: tuple[str, dict[str, str]]) -> None:
    from trackway.trainer.calls.protobuf import schema as messages

    url, known = served
    request = messages().ForwardBackwardRequest(model_id=known["model_id"], seq_id=1, loss_fn="cross_entropy")
    datum = request.data.add()
    datum.model_input.add().encoded_text.tokens = bytes(range(40))
    datum.loss_fn_inputs["target_tokens"].dense = bytes(80)
    body = bytearray(request.SerializeToString())
    body[place % len(body)] ^= 0xFF
    with calling(url) as caller:
        answer = caller.http.post(
            "forward_backward", content=bytes(body), headers={"content-type": "application/x-protobuf"}
        )
    assert answer.status_code in (200, 400, 404), answer.text
