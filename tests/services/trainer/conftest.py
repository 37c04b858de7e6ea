"""A scripted agent service over a real socket, and the rows it is asked about."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import uvicorn
from fastapi import FastAPI
from fastapi.responses import StreamingResponse

from trackway.wire.agent import GroupRequest, RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory, WeightSpan, trajectory_id

Serving = Callable[[FastAPI], AbstractContextManager[str]]


def scripted_trajectory(request: GroupRequest, rollout_n: int) -> Trajectory:
    """A rollout whose tokens and reward follow from its place alone."""
    tags = Tags(
        experiment_name=request.experiment_name,
        step=request.step,
        sample_index=request.sample.index,
        rollout_n=rollout_n,
        validate=request.validation,
    )
    ids = [3 + (request.step + request.sample.index + rollout_n + place) % 20 for place in range(4)]
    return Trajectory(
        id=trajectory_id(request.run, tags),
        session_id="session",
        tags=tags,
        agent_name=request.sample.agent_name or "",
        data_source=request.sample.data_source,
        prompt_ids=[1, 2, 3],
        response_ids=ids,
        response_mask=[1, 1, 0, 1],
        response_logprobs=[-3.0, -3.0, 0.0, -3.0],
        weight_versions=[WeightSpan(version=request.min_weight_version, start=0, end=4)],
        reward=Reward(score=float(rollout_n % 2), components={"acc": float(rollout_n % 2)}),
        num_turns=2,
        stop_reason=StopReason.ANSWERED,
        trace_id=f"{request.step:016x}{request.sample.index:08x}{rollout_n:08x}" if request.trace else None,
    )


@dataclass
class ScriptedAgent:
    """An agent service that answers at once, unless told to break or to wait."""

    breaks: list[int] = field(default_factory=list)
    """The next streams break after this many lines."""
    holding_at: int | None = None
    """Groups of this step and later wait until `released`."""
    requests: list[GroupRequest] = field(default_factory=list)
    released: threading.Event = field(default_factory=threading.Event)

    def app(self) -> FastAPI:
        """The service."""
        app = FastAPI()

        @app.post("/groups")
        async def groups(request: GroupRequest) -> StreamingResponse:
            self.requests.append(request)
            return StreamingResponse(self._lines(request, self.breaks.pop(0) if self.breaks else None))

        return app

    async def _lines(self, request: GroupRequest, breaks_after: int | None) -> AsyncIterator[str]:
        held = self.holding_at is not None and request.step >= self.holding_at
        while held and not self.released.is_set():
            await asyncio.sleep(0.02)
        for sent, rollout_n in enumerate(request.rollout_numbers()):
            if sent == breaks_after:
                raise ConnectionResetError("scripted break")
            yield scripted_trajectory(request, rollout_n).model_dump_json() + "\n"


@pytest.fixture
def scripted() -> Callable[[GroupRequest, int], Trajectory]:
    """The trajectory that the scripted agent gives for a request's rollout."""
    return scripted_trajectory


@pytest.fixture(scope="session")
def new_agent() -> Callable[[], ScriptedAgent]:
    """Makes a scripted agent."""
    return ScriptedAgent


@pytest.fixture
def agent() -> ScriptedAgent:
    return ScriptedAgent()


@pytest.fixture
def agent_url(agent: ScriptedAgent, serving: Serving) -> Iterator[str]:
    """The scripted agent's URL."""
    with serving(agent.app()) as url:
        yield url
        agent.released.set()


@pytest.fixture(scope="session")
def serving() -> Serving:
    """`with serving(app) as url`: the app on a free port, in a thread."""

    @contextmanager
    def serve(app: FastAPI) -> Iterator[str]:
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        end = time.monotonic() + 10
        while not server.started and time.monotonic() < end:
            time.sleep(0.01)
        assert server.started, "the scripted service did not start within 10 s"
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        server.should_exit = True
        thread.join(10)

    return serve


@pytest.fixture(scope="session")
def sample() -> Callable[[int], Sample]:
    """A row by its index."""

    def make(index: int) -> Sample:
        return Sample(
            data_source="openai/gsm8k",
            prompt=[Message(role="user", content=f"question {index}")],
            reward_model=RewardModel(ground_truth=str(index)),
            extra_info={"index": index},
        )

    return make


@pytest.fixture
def rollout() -> Callable[..., Trajectory]:
    """Makes a scored two-turn trajectory: prompt of 3, response of 2 model, 2 observation and 2 model tokens.

    Called with (sample_index, rollout_n, score) and any field to replace.
    """

    def make(sample_index: int = 0, rollout_n: int = 0, score: float = 0.0, **changes: object) -> Trajectory:
        tags = Tags(experiment_name="e", step=1, sample_index=sample_index, rollout_n=rollout_n)
        values: dict[str, object] = {
            "prompt_ids": [10, 11, 12],
            "response_ids": [20, 21, 30, 31, 22, 23],
            "response_mask": [1, 1, 0, 0, 1, 1],
            "response_logprobs": [-4.0, -4.1, 0.0, 0.0, -4.2, -4.3],
            "reward": Reward(score=score),
            "stop_reason": StopReason.ANSWERED,
            "num_turns": 4,
        }
        place = {"id": trajectory_id("r", tags), "session_id": "s", "tags": tags, "agent_name": "a", "data_source": "d"}
        return Trajectory.model_validate({**place, **values, **changes})

    return make


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random Qwen3 of 2 layers, vocabulary 64, tied, with weights large enough to prefer some tokens clearly."""
    import torch  # here, as the other tests of this folder need no torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("tiny_model")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=64,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        initializer_range=0.5,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
