"""The service over ASGI: what a client sees."""

import asyncio
import json
import shutil
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Protocol

import httpx
import pytest
from fastapi import FastAPI
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.learner.weight_proof import tensor_digests
from trackway.rollout import policies
from trackway.rollout.app import create_app
from trackway.rollout.service import TokenText
from trackway.rollout.settings import RolloutSettings
from trackway.tracing import Tracing, TracingSettings, inject, trajectory_span
from trackway.tracing.span_handle import activated
from trackway.wire.rollout import GenerateReply, WeightsReply
from trackway.wire.trajectory import Tags
from trackway.wire.weights import Verdict, WeightProof

pytestmark = pytest.mark.anyio

PROMPT = {"token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 6, "seed": 1, "ignore_eos": True}}
ENDLESS = {"token_ids": [11, 12, 13], "sampling_params": {"max_tokens": 300, "ignore_eos": True}}


class Running(Protocol):
    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]: ...


@pytest.fixture
def settings(model_path: Path, tmp_path: Path) -> RolloutSettings:
    return RolloutSettings(
        model_path=model_path,
        model_name="tiny",
        weights_url=str(tmp_path / "weights"),
        device="cpu",
        max_num_seqs=2,
        max_queue=0,
        weight_wait_s=0.1,
    )


def error_of(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


async def test_a_prompt_comes_back_continued_with_logprobs_versions_and_counts(
    running: Running, settings: RolloutSettings
) -> None:
    async with running(create_app(settings)) as client:
        answer = await client.post("/generate", json={**PROMPT, "request_id": "r1"})
        alias = await client.post("/inference/v1/generate", json=PROMPT)
        refused = await client.post("/generate", json={**PROMPT, "token_ids": [11] * 100_000})
        metrics = (await client.get("/metrics")).text.splitlines()
    reply = GenerateReply.model_validate(answer.json())
    choice = reply.choices[0]
    assert (reply.request_id, reply.model, reply.usage.total_tokens) == ("r1", "tiny", 9)
    assert [entry["token_id"] for entry in choice.logprobs.content] == choice.token_ids
    assert [(s.version, s.start, s.end) for s in choice.weight_versions] == [(0, 0, 6)]
    assert alias.json()["choices"][0]["token_ids"] == choice.token_ids
    code = refused.json()["error"]["code"]
    own = 'gen_ai_operation_name="chat",gen_ai_provider_name="trackway",gen_ai_request_model="tiny"'
    assert {
        f"gen_ai_client_inference_usage_input_tokens_total{{{own}}} 6.0",
        f"gen_ai_client_inference_usage_output_tokens_total{{{own}}} 12.0",
        f'gen_ai_client_inference_duration_seconds_count{{error_type="",{own}}} 2.0',
        f'gen_ai_client_inference_duration_seconds_count{{error_type="{code}",{own}}} 1.0',
    } <= set(metrics)


async def test_published_weights_are_served_and_named(
    running: Running, settings: RolloutSettings, other_path: Path
) -> None:
    assert settings.weights_url is not None
    WeightStore(settings.weights_url).publish(3, "run", other_path, ANY_PROOF)
    async with running(create_app(settings)) as client:
        weights = WeightsReply.model_validate((await client.get("/weights")).json())
        answer = await client.post("/generate", json={**PROMPT, "min_weight_version": 3})
    assert weights == WeightsReply(
        version=3, latest=3, model="tiny", replica=settings.replica, verdict=Verdict.INDISTINGUISHABLE
    )
    assert answer.json()["choices"][0]["weight_versions"] == [{"version": 3, "start": 0, "end": 6}]


async def test_what_the_load_proved_is_told_and_measured(
    running: Running, settings: RolloutSettings, other_path: Path
) -> None:
    assert settings.weights_url is not None
    proof = WeightProof(digests=tensor_digests(other_path))
    WeightStore(settings.weights_url).publish(3, "run", other_path, proof=proof)
    async with running(create_app(settings)) as client:
        weights = WeightsReply.model_validate((await client.get("/weights")).json())
        metrics = (await client.get("/metrics")).text
    shown = {line.split("{")[0].split()[0]: float(line.split()[-1]) for line in metrics.splitlines() if line[0] != "#"}
    assert weights.verdict is Verdict.PROVEN
    assert (shown["trackway_weight_tensors_proven"], shown["trackway_weight_distinct"]) == (1.0, 1.0)
    assert shown["trackway_weight_logprobs_off"] == 0.0


async def test_weights_that_do_not_come_are_a_409_with_have_and_want(
    running: Running, settings: RolloutSettings
) -> None:
    async with running(create_app(settings)) as client:
        answer = await client.post("/generate", json={**PROMPT, "min_weight_version": 2})
    assert error_of(answer) == (409, "weights_behind")
    assert answer.json()["error"]["detail"] == {"have": 0, "want": 2}
    assert answer.json()["error"]["retryable"] is True


async def test_a_paused_replica_says_so_everywhere_until_resumed(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        assert (await client.post("/pause", json={"mode": "keep"})).json()["paused"] is True
        assert error_of(await client.post("/generate", json=PROMPT)) == (503, "paused")
        ready = await client.get("/ready")
        assert (ready.status_code, ready.json()["reason"]) == (503, "generation is paused; POST /resume")
        assert (await client.post("/resume")).json() == {"paused": False, "running": 0, "waiting": 0}
        assert (await client.post("/generate", json=PROMPT)).status_code == 200


async def test_one_request_too_many_is_a_429(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        answers = await asyncio.gather(*(client.post("/generate", json=ENDLESS) for _ in range(3)))
    assert sorted(answer.status_code for answer in answers) == [200, 200, 429]


@pytest.mark.parametrize("body", [{"token_ids": []}, {"token_ids": [97]}, {"token_ids": [5], "max_tokens": 3}])
async def test_a_request_that_cannot_be_served_is_a_422(
    running: Running, settings: RolloutSettings, body: dict[str, object]
) -> None:
    async with running(create_app(settings)) as client:
        assert error_of(await client.post("/generate", json=body)) == (422, "invalid_request")


async def test_the_model_is_listed_in_openais_words(running: Running, settings: RolloutSettings) -> None:
    async with running(create_app(settings)) as client:
        listed = (await client.get("/v1/models")).json()
    assert listed["object"] == "list"
    assert (listed["data"][0]["id"], listed["data"][0]["max_model_len"]) == ("tiny", 1024)


async def test_a_corrupt_first_version_keeps_the_replica_unready(
    running: Running, settings: RolloutSettings, other_path: Path
) -> None:
    store = WeightStore(str(settings.weights_url))
    store.publish(1, "run", other_path, ANY_PROOF)
    (Path(str(settings.weights_url)) / "1" / "model.safetensors").write_bytes(b"torn")
    async with running(create_app(settings)) as client:
        ready = await client.get("/ready")
        assert ready.status_code == 503
        assert "expected sha256" in ready.json()["reason"]
        assert error_of(await client.post("/generate", json=PROMPT)) == (503, "unavailable")


async def traced(running: Running, settings: RolloutSettings, body: dict[str, object]) -> ReadableSpan:
    """The rollout's own span of one request inside a recorded trajectory."""
    exporter = InMemorySpanExporter()
    tracing = Tracing("rollout", TracingSettings(), exporter)
    headers: dict[str, str] = {}
    tags = Tags(experiment_name="e", step=1, sample_index=0, rollout_n=0)
    with activated(tracing), trajectory_span(tags, "t", "agent", [], record=True):
        inject(headers)
    async with running(create_app(settings, tracing=tracing)) as client:
        await client.post("/generate", json=body, headers=headers)
        tracing.flush(5.0)
        return next(span for span in exporter.get_finished_spans() if span.name == "chat tiny")


async def test_a_recorded_generation_shows_counts_reason_version_and_new_text(
    running: Running, settings: RolloutSettings, tokenizer_path: Path
) -> None:
    settings = settings.model_copy(update={"model_path": tokenizer_path})
    span = await traced(running, settings, {**PROMPT, "context_start": 1, "request_id": "r7"})
    attributes = span.attributes or {}
    assert attributes["gen_ai.usage.input_tokens"] == 3
    assert attributes["gen_ai.usage.output_tokens"] == 6
    assert attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert attributes["gen_ai.response.id"] == "r7"
    assert attributes["agentic.weight_version"] == "0"
    assert attributes["agentic.inputs"] == '{"messages": [{"role": "user", "content": "w12 w13"}]}'
    assert len(json.loads(str(attributes["agentic.outputs"]))["messages"][0]["content"].split()) == 6


async def test_a_tokenizer_that_does_not_load_costs_the_text_and_nothing_else(
    running: Running, settings: RolloutSettings, model_path: Path, tmp_path: Path
) -> None:
    broken = shutil.copytree(model_path, tmp_path / "broken")
    (broken / "tokenizer.json").write_text("{")
    span = await traced(running, settings.model_copy(update={"model_path": broken}), PROMPT)
    assert [event.name for event in span.events] == ["text_unavailable"]
    assert "agentic.inputs" not in (span.attributes or {})


async def test_waiting_for_weights_is_an_incident_of_the_span(running: Running, settings: RolloutSettings) -> None:
    span = await traced(running, settings, {**PROMPT, "min_weight_version": 2})
    assert dict(span.events[0].attributes or {}) == {"have": 0, "want": 2}
    assert span.events[0].name == "weights_behind"
    assert not span.status.is_ok


async def test_loading_what_was_just_published_is_no_incident(
    running: Running, settings: RolloutSettings, other_path: Path
) -> None:
    follows = settings.model_copy(update={"watch_interval_s": 60, "weight_wait_s": 30, "weights_late_s": 30})
    async with running(create_app(follows)) as client:
        WeightStore(str(settings.weights_url)).publish(2, "run", other_path, ANY_PROOF)
        waited = await client.post("/generate", json={**PROMPT, "min_weight_version": 2})
    assert (waited.status_code, waited.headers.get("x-trackway-trace")) == (200, None)


@pytest.mark.parametrize(("published", "status"), [(2, 200), (None, 409)])
async def test_the_answer_tells_the_agent_that_the_replica_was_behind(
    running: Running, settings: RolloutSettings, other_path: Path, published: int | None, status: int
) -> None:
    waits = {"watch_interval_s": 60, "weight_wait_s": 0.1 if published is None else 30, "weights_late_s": 0.0}
    follows = settings.model_copy(update=waits)
    async with running(create_app(follows)) as client:
        if published is not None:
            WeightStore(str(settings.weights_url)).publish(published, "run", other_path, ANY_PROOF)
        waited = await client.post("/generate", json={**PROMPT, "min_weight_version": 2})
        after = await client.post("/generate", json=PROMPT)
    assert (waited.status_code, waited.headers["x-trackway-trace"]) == (status, "incidents=weights_behind")
    assert "x-trackway-trace" not in after.headers


@pytest.mark.parametrize("setting", [True, False])
async def test_text_is_decoded_only_for_a_recorded_span_that_carries_it(
    running: Running, settings: RolloutSettings, tokenizer_path: Path, monkeypatch: pytest.MonkeyPatch, setting: bool
) -> None:
    decoded: list[int] = []
    decode = TokenText.decode

    async def counting(self: TokenText, token_ids: Sequence[int]) -> str:
        decoded.append(len(token_ids))
        return await decode(self, token_ids)

    monkeypatch.setattr(TokenText, "decode", counting)
    tracing = Tracing("rollout", TracingSettings(token2text=setting), InMemorySpanExporter())
    settings = settings.model_copy(update={"model_path": tokenizer_path})
    async with running(create_app(settings, tracing=tracing)) as client:
        await client.post("/generate", json=PROMPT)
        await client.post("/generate", json=PROMPT, headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-00"})
        assert decoded == []
        await client.post("/generate", json=PROMPT, headers={"traceparent": f"00-{'a' * 32}-{'b' * 16}-01"})
    assert decoded == ([3, 6] if setting else [])


async def test_the_load_counts_those_who_ask_for_it(
    running: Running, settings: RolloutSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(create_app(settings)) as client:
        found = [(await client.get(f"/load?caller={name}")).json() for name in ("a", "b", "", "a")]
        monkeypatch.setattr(policies, "CALLER_S", 0.0)
        found.append((await client.get("/load?caller=c")).json())
        refused = await client.get("/load", params={"caller": "a" * 65})
    longest = found[0]["max_len"]
    assert found[0] == {
        "running": 0,
        "waiting": 0,
        "preemptions": 0,
        "kv_used": 0,
        "kv_tokens": 2 * longest,
        "max_len": longest,
        "callers": 1,
    }
    assert [load["callers"] for load in found] == [1, 2, 2, 2, 1]
    assert error_of(refused) == (422, "invalid_request")
