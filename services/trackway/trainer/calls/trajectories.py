"""The data of a step as trajectories, for the console and exports: `trajectories/` and `token_values/` of the run."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from trackway.learner.batch import TokenValues
from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.trainer.calls.losses import LossOutput, weights_of
from trackway.trainer.calls.protobuf import Array, Datum, ForwardBackward
from trackway.trainer.run_state.folder import TOKEN_VALUES
from trackway.trainer.run_state.token_values import write_token_values
from trackway.trainer.run_state.trajectory_dump import write_trajectories
from trackway.wire.trajectory import StopReason, Tags, Trajectory, trajectory_id

AGENT = "tinker"
"""Name of the agent of these trajectories. The caller's own loop has no name."""


class TrainedDatum(NamedTuple):
    """A datum of one target for each token, and the policy's logprobs [N] of the targets."""

    loss_fn: str
    datum: Datum
    logprobs: Array

    @property
    def weights(self) -> Array:
        """[N]: the advantages, or the weights of cross_entropy."""
        return self.datum.inputs[weights_of(self.loss_fn)]

    @property
    def start(self) -> int:
        """Place of the first target that is trained: what is before is the prompt."""
        trained = np.flatnonzero(self.weights)
        return int(trained[0]) if len(trained) else len(self.weights) - 1


def trained_data(request: ForwardBackward, output: LossOutput) -> list[TrainedDatum]:
    """The data of a request. Those of several targets for a token are left out."""
    pairs = zip(request.data, output.logprobs, strict=True)
    return [TrainedDatum(request.loss_fn, datum, logprobs) for datum, logprobs in pairs if datum.targets.ndim == 1]


def write_step(folder: Path, step: int, data: Sequence[TrainedDatum]) -> None:
    """Write the trajectories of a step and the values of their tokens. Raises StorageError."""
    if not data:
        return
    trajectories = trajectories_of(folder.name, step, data)
    write_trajectories(folder / "trajectories" / f"step_{step}.parquet", trajectories)
    batch = FilteredBatch(trajectories, [TrainStatus.USED] * len(data))

    def flat(values: Sequence[Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.float32))

    weights = flat([trained.weights[trained.start :] for trained in data])
    logprobs, kept = flat([trained.logprobs[trained.start :] for trained in data]), weights != 0
    values = TokenValues(
        lengths=[len(trained.weights) - trained.start for trained in data],
        logprobs=logprobs.masked_fill(~kept, torch.nan),
        entropies=torch.full_like(weights, torch.nan),
        advantages=weights.masked_fill(~kept, torch.nan),
        clipped=torch.zeros_like(kept),
        kept=kept,
    )
    write_token_values(folder / TOKEN_VALUES / f"step_{step}.parquet", step, batch, values)


def trajectories_of(run: str, step: int, data: Sequence[TrainedDatum]) -> list[Trajectory]:
    """The data as trajectories without a reward. Those of one prompt are rollouts of one sample.

    The mask has the targets that are trained. `session_id` is the first sampled sequence that the datum names.
    """
    groups: dict[tuple[int, ...], int] = {}
    rollouts: dict[int, int] = {}
    found: list[Trajectory] = []
    for trained in data:
        loss_fn, datum, logprobs = trained
        start = trained.start
        prompt = datum.tokens[: start + 1].tolist()
        sample = groups.setdefault(tuple(prompt), len(groups))
        rollouts[sample] = rollouts.get(sample, -1) + 1
        tags = Tags(experiment_name=run, step=step, sample_index=sample, rollout_n=rollouts[sample])
        found.append(
            Trajectory(
                id=trajectory_id(run, tags),
                session_id=datum.samples[0] if datum.samples else "",
                tags=tags,
                agent_name=AGENT,
                data_source=loss_fn,
                prompt_ids=prompt,
                response_ids=datum.targets[start:].tolist(),
                response_mask=(trained.weights[start:] != 0).astype(int).tolist(),
                response_logprobs=datum.inputs.get("logprobs", logprobs)[start:].astype(float).tolist(),
                num_turns=2,
                stop_reason=StopReason.ANSWERED,
            )
        )
    return found
