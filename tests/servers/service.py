"""The rollout service over a real server."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import ModuleType
from typing import Literal

import httpx
import pytest

from tests.services.evaluation.rollouts import rollout
from tests.vllm.vllm_runs import DEADLINE_S, LONG, PROMPT, SHORT, Weights, logprobs_of
from tests.waiting import async_until
from trackway.agent.models import Teachers
from trackway.agent.settings import AgentSettings
from trackway.clients import Deadline
from trackway.clients.rollout import RolloutClient
from trackway.clients.weights import WeightStore
from trackway.rollout.app import create_app
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.agent import Teacher
from trackway.wire.rollout import GenerateRequest, PausedReply
from trackway.wire.trajectory import TeacherScores

Mode = Literal["keep", "wait", "abort"]


@asynccontextmanager
async def serving(
    server: ModuleType, engine: RemoteEngine, base: Path, folder: Path, mode: Mode = "keep"
) -> AsyncIterator[RolloutClient]:
    """The service, attached to the session's server and following a store in `folder`."""
    settings = server.settings_of(
        base, folder / "log", engine_url=engine.http.base_url, weights_url=str(folder / "store"), update_mode=mode
    )
    async with client_of(settings) as client:
        yield client


@asynccontextmanager
async def client_of(settings: RolloutSettings) -> AsyncIterator[RolloutClient]:
    """A client of the service with these settings, in this process."""
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://rollout") as http:
            yield RolloutClient("http://rollout", http)


async def test_the_service_answers_in_the_wires_words_and_follows_its_store(
    server: ModuleType, shared: RemoteEngine, base: Path, first: Weights, second: Weights, tmp_path: Path
) -> None:
    request = GenerateRequest(token_ids=PROMPT, sampling_params=SHORT, request_id="mine")
    async with serving(server, shared, base, tmp_path) as client:
        old = await client.generate(request)
        WeightStore(str(tmp_path / "store")).publish(1, "run", second.folder, proof=second.proof)
        new = await client.generate(request.model_copy(update={"min_weight_version": 1}))
    assert (old.request_id, old.usage.prompt_tokens, old.usage.completion_tokens) == ("mine", 3, 8)
    for reply, weights, version in ((old, first, 0), (new, second, 1)):
        assert [span.version for span in reply.choices[0].weight_versions] == [version]
        assert reply.choices[0].token_logprobs == pytest.approx(
            logprobs_of(weights.model, [*PROMPT, *reply.choices[0].token_ids], 3), abs=1e-4
        )


async def test_a_teacher_on_the_server_scores_as_one_on_the_torch_engine(
    server: ModuleType, engine: RemoteEngine, base: Path, tmp_path: Path
) -> None:
    long = rollout(0, 0, 1.0).model_copy(
        update={
            "prompt_ids": [*PROMPT, *([7, 9] * 20)],
            "response_ids": [11, 4, 30, 5, 6, 41, 8, 12],
            "response_mask": [1, 1, 1, 0, 0, 1, 0, 1],
        }
    )
    rows, deadline = [long, rollout(0, 1, 1.0)], Deadline.after(DEADLINE_S)
    on_torch = RolloutSettings(model_path=base, weights_url=str(tmp_path / "other-store"))
    teacher = Teacher(name="math", model=on_torch.model_name, top_k=5)
    scored: list[list[TeacherScores]] = []
    async with serving(server, engine, base, tmp_path) as ours, client_of(on_torch) as theirs:
        for client in (ours, theirs):
            asked = Teachers(AgentSettings(model_path=str(base)), client)
            scored.append(await asked.scores(teacher, rows, "group", deadline))

    assert [(len(scores.logprobs), len(scores.top_ids)) for scores in scored[0]] == [(5, 5), (2, 2)]
    for one, other in zip(*scored, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert one.top_ids == other.top_ids
        tops = zip(one.top_logprobs, other.top_logprobs, strict=True)
        assert all(values == pytest.approx(expected, abs=1e-4) for values, expected in tops)


async def under_way(client: RolloutClient, mode: Mode) -> bool:
    """Whether the update is done or, in the mode `wait`, waits for the generation."""
    if mode == "wait":
        return (await client.call("GET", "/is_paused", reply=PausedReply)).is_paused
    return (await client.weights()).version == 1


@pytest.mark.parametrize(("mode", "versions"), [("keep", [0, 1]), ("abort", [0, 1]), ("wait", [0])])
async def test_versions_are_exact_over_an_update_in_each_mode(
    server: ModuleType,
    engine: RemoteEngine,
    base: Path,
    first: Weights,
    second: Weights,
    tmp_path: Path,
    mode: Mode,
    versions: list[int],
) -> None:
    async with serving(server, engine, base, tmp_path, mode) as client:
        async with server.slowed(engine):
            call = asyncio.create_task(client.generate(GenerateRequest(token_ids=PROMPT, sampling_params=LONG)))
            await server.busy(engine)
            WeightStore(str(tmp_path / "store")).publish(1, "run", second.folder, proof=second.proof)
            await async_until(lambda: under_way(client, mode))
        choice = (await call).choices[0]
        request = GenerateRequest(token_ids=PROMPT, sampling_params=SHORT, min_weight_version=1)
        later = (await client.generate(request)).choices[0]

    assert (choice.finish_reason, len(choice.token_ids)) == ("length", LONG.max_tokens)
    assert [span.version for span in choice.weight_versions] == versions
    cut = choice.weight_versions[0].end
    old = logprobs_of(first.model, [*PROMPT, *choice.token_ids], len(PROMPT), LONG)
    new = logprobs_of(second.model, [*PROMPT, *choice.token_ids], len(PROMPT), LONG)
    assert choice.token_logprobs[:cut] == pytest.approx(old[:cut], abs=1e-4)
    if mode == "abort":  # new weights compute the tokens of the old ones again
        assert choice.token_logprobs[cut:] == pytest.approx(new[cut:], abs=1e-4)
    if mode != "wait":
        assert abs(choice.token_logprobs[cut] - old[cut]) > 1e-4
    assert [span.version for span in later.weight_versions] == [1]
