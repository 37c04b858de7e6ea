"""SmolLM2-135M-Instruct in engines and learners: prompts by its chat template, an update, logprobs on both sides."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from make_rows import problems
from transformers import AutoTokenizer

from tests.services.trainer.learner_settings import learner_config
from tests.services.trainer.rank_processes import rank_processes
from trackway.learner.learner import Learner
from trackway.learner.ranks.sharding import ALONE, Ranks
from trackway.rollout.engines.protocol import Engine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Reward, StopReason, Tags, Trajectory
from trackway.wire.weights import WeightProof

GROUPS, ROLLOUTS, TOKENS = 4, 4, 24
RANK, ALPHA = 16, 32
LORA = {"lora_rank": RANK, "lora_alpha": ALPHA, "lr": 3e-4}
FULL = {"lr": 1e-5}


class Published(NamedTuple):
    """What a learner published after an update."""

    folder: Path
    proof: WeightProof
    log_probs: Callable[[Sequence[Trajectory]], list[list[float]]]
    """The learner's logprobs of the response tokens."""

    def differences(self, trajectories: Sequence[Trajectory]) -> list[float]:
        """Between the sampler's logprob of each token and the learner's."""
        return [
            abs(ours - theirs)
            for trajectory, learned in zip(trajectories, self.log_probs(trajectories), strict=True)
            for ours, theirs in zip(trajectory.response_logprobs, learned, strict=True)
        ]


def engine_settings(model: Path, **more: Any) -> RolloutSettings:
    """In float32 on the CPU."""
    return RolloutSettings(
        model_path=model, device="cpu", dtype="float32", max_num_seqs=GROUPS * ROLLOUTS, max_model_len=256, **more
    )


def prompts(model: Path) -> list[list[int]]:
    """One per group, by the model's chat template."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = problems("held_out", GROUPS, seed=0)
    return [
        tokenizer.apply_chat_template(
            [message.model_dump(exclude_none=True) for message in row.prompt],
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
        )
        for row in rows
    ]


async def sampled(engine: Engine, model: Path, temperature: float = 1.0) -> list[Trajectory]:
    """A batch by this engine, with a reward for every other rollout."""
    asked = [(group, prompt, n) for group, prompt in enumerate(prompts(model)) for n in range(ROLLOUTS)]
    made = await asyncio.gather(
        *(
            engine.generate(
                prompt,
                SamplingParams(max_tokens=TOKENS, seed=10 * group + n, temperature=temperature, ignore_eos=True),
                f"{group}/{n}",
            )
            for group, prompt, n in asked
        )
    )
    return [
        Trajectory(
            id=f"{group}/{n}",
            session_id="s",
            tags=Tags(experiment_name="e", step=1, sample_index=group, rollout_n=n),
            agent_name="single_turn_agent",
            data_source="trackway/number_words",
            prompt_ids=prompt,
            response_ids=generation.token_ids,
            response_mask=[1] * len(generation.token_ids),
            response_logprobs=generation.logprobs,
            weight_versions=generation.spans,
            reward=Reward(score=float(n % 2)),
            num_turns=2,
            stop_reason=StopReason.ANSWERED,
        )
        for (group, prompt, n), generation in zip(asked, made, strict=True)
    ]


@contextmanager
def made_by(kind: str, model: Path, batch: Sequence[Trajectory], folder: Path) -> Iterator[Published]:
    """A learner of this kind after an update, such as `LoRA, 2 ranks`, and what it publishes."""
    settings = LORA if kind.startswith("LoRA") else FULL
    if kind.endswith("1 rank"):
        proof = update(ALONE, model, settings, batch, folder)
        yield Published(folder, proof, lambda trajectories: log_probs(ALONE, trajectories))
        _learners.clear()
        return
    with rank_processes(2) as group:
        proof = group.run(update, model, settings, batch, folder)[0]
        yield Published(folder, proof, lambda trajectories: group.run(log_probs, trajectories)[0])


_learners: list[Learner] = []
"""That of this process."""


def update(
    ranks: Ranks, model: Path, settings: dict[str, Any], batch: Sequence[Trajectory], folder: Path
) -> WeightProof:
    """An update on the batch by a learner that stays in this process, and what it publishes."""
    config = learner_config(model, remove_padding=True, micro_batch_size=8, **settings)
    learner = Learner(config, ranks)
    learner.update(batch)
    learner.export_to_engines(folder)
    _learners[:] = [learner]
    return learner.proof(folder, previous_version=1)


def log_probs(ranks: Ranks, trajectories: Sequence[Trajectory]) -> list[list[float]]:
    """That learner's logprobs of the response tokens."""
    (learner,) = _learners
    return learner.log_probs(trajectories)
