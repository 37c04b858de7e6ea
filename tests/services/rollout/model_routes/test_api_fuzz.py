"""schemathesis calls the routes of model APIs with what their schemas allow, and with what they do not."""

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from schemathesis import Case
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import content_type_conformance, response_schema_conformance
from transformers import PreTrainedTokenizerBase

from tests.services.rollout.model_routes.scripted_engine import ScriptedEngine
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.app import create_app
from trackway.rollout.settings import RolloutSettings

pytestmark = pytest.mark.slow

SLOW_OR_LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
bounded = settings(
    max_examples=30,
    derandomize=True,
    deadline=None,
    suppress_health_check=[*SLOW_OR_LARGE, HealthCheck.function_scoped_fixture],
)

app = create_app(RolloutSettings(model_path=TINY_MODEL, model_name="tiny"), ScriptedEngine())
schema = schemathesis.openapi.from_dict(app.openapi()).include(path_regex="^/v1/", method="POST")


@schema.parametrize()
@bounded
def test_no_request_finds_a_500_or_an_answer_that_is_not_documented(
    case: Case, scripted_url: str, engine: ScriptedEngine, tokenizer: PreTrainedTokenizerBase
) -> None:
    engine.says = tokenizer.encode("ok<|im_end|>", add_special_tokens=False)
    if isinstance(case.body, dict) and "model" in case.body:
        case.body["model"] = "tiny"
    checks = [not_a_server_error, content_type_conformance, response_schema_conformance]
    case.call_and_validate(base_url=scripted_url, checks=checks)
