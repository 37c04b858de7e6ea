"""What every service can send to is asked before a run starts, over real sockets."""

from collections.abc import Callable

import pytest

from trackway.run_config import RunConfig, compose
from trackway.serving import ServiceSettings, service_app
from trackway.tracing import TracingSettings
from trackway.trainer.traces.preflight import check_backends
from trackway.wire.errors import ErrorCode, TrackwayError

pytestmark = [pytest.mark.slow, pytest.mark.anyio, pytest.mark.usefixtures("shared_http")]

NOTHING = TracingSettings(mlflow_uri=None, weave_api_key=None, otlp_endpoint=None)
MLFLOW = TracingSettings(mlflow_uri="http://127.0.0.1:9", weave_api_key=None, otlp_endpoint=None)
EVERYTHING = TracingSettings.model_validate(
    {"mlflow_uri": "http://127.0.0.1:9", "weave_api_key": "key", "otlp_endpoint": "http://127.0.0.1:9"}
)


def config(*backends: str, **trackway: str) -> RunConfig:
    own = [f"trackway.{key}={value}" for key, value in trackway.items()]
    trace = "actor_rollout_ref.rollout.trace"
    return compose([f"{trace}.backend=[{','.join(backends)}]", f"{trace}.project_name=me/p", *own])


@pytest.fixture
def service(serving) -> Callable:
    """A service with this tracing, on a socket."""

    def serve(tracing: TracingSettings):
        return serving(service_app("tools", ServiceSettings(tracing=tracing), routers=[]))

    return serve


async def test_a_service_without_the_backend_is_named_with_the_remedy(service):
    with service(EVERYTHING) as agent, service(MLFLOW) as tools, pytest.raises(TrackwayError) as caught:
        await check_backends(config("mlflow", "weave"), {"agent": agent, "tools": tools}, EVERYTHING)

    assert caught.value.code is ErrorCode.INVALID_REQUEST
    assert caught.value.message == (
        "trace backend weave needs W&B's API key: set WANDB_API_KEY in the environment of the tools service, "
        "and restart it"
    )


async def test_the_trainer_itself_must_know_the_backend_too(service):
    with service(EVERYTHING) as agent, pytest.raises(TrackwayError, match="of the trainer service"):
        await check_backends(config("otlp"), {"agent": agent}, MLFLOW)


async def test_a_run_that_names_its_mlflow_needs_none_of_the_trainers_own(service):
    with service(MLFLOW) as agent:
        await check_backends(config("mlflow", mlflow_uri="http://127.0.0.1:9"), {"agent": agent}, NOTHING)


async def test_a_deployment_that_has_everything_passes(service):
    with service(EVERYTHING) as agent:
        await check_backends(config("mlflow", "weave", "otlp"), {"agent": agent}, EVERYTHING)


async def test_a_service_that_cannot_be_asked_is_no_obstacle_and_is_told(caplog):
    await check_backends(config("mlflow"), {"agent": "http://127.0.0.1:9"}, MLFLOW)

    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(
        "the trace backends of the agent service are unknown, as it did not answer: GET http://127"
    )


async def test_a_run_without_a_backend_asks_nobody(caplog):
    await check_backends(config(), {"agent": "http://127.0.0.1:9"}, NOTHING)

    assert caplog.records == []


async def test_a_missing_key_and_a_missing_entity_are_reported_together(service, monkeypatch):
    monkeypatch.delenv("WANDB_ENTITY", raising=False)

    with service(MLFLOW) as agent, pytest.raises(TrackwayError) as caught:
        await check_backends(compose(["actor_rollout_ref.rollout.trace.backend=weave"]), {"agent": agent}, MLFLOW)

    missing_key = "trace backend weave needs W&B's API key: set WANDB_API_KEY in the environment of"
    assert caught.value.message == (
        f"{missing_key} the trainer service, and restart it; {missing_key} the agent service, and restart it; "
        "actor_rollout_ref.rollout.trace.project_name: expected entity/project for Weave, got 'trackway'; add the "
        "entity, or set WANDB_ENTITY in the environment of the trainer service"
    )


async def test_a_weave_project_without_an_entity_is_refused(monkeypatch, caplog):
    monkeypatch.delenv("WANDB_ENTITY", raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")

    with pytest.raises(TrackwayError, match="expected entity/project for Weave, got 'trackway'"):
        await check_backends(
            compose(["actor_rollout_ref.rollout.trace.backend=weave"]), {"agent": "http://127.0.0.1:9"}, EVERYTHING
        )
    assert caplog.records[-1].getMessage().startswith("W&B did not tell whose API key this is")
