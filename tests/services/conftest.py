"""Rows, trajectories and a tiny model, for the learner and the trainer."""

from collections.abc import Callable
from pathlib import Path

import pytest

from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import Message
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory, trajectory_id


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
    from tests.tiny_models import tiny_qwen3  # here, as the other tests of this folder need no torch

    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "head_dim": 16, "intermediate_size": 64}
    folder = tmp_path_factory.mktemp("tiny_model")
    tiny_qwen3(folder, **sizes, max_position_embeddings=128, initializer_range=0.5)
    (folder / "tokenizer_config.json").write_text('{"model_max_length": 128}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder
