"""Tinker's losses of a request: sums over tokens, with the formulas of the fit loop's policy losses.

The data of a step are kept as trajectories, for the console and exports: `trajectories/` and `token_values/`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, zip_longest
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from trackway.learner.algorithm import Aggregation
from trackway.learner.batch import TokenValues, TrainingBatch
from trackway.learner.config import LearnerConfig
from trackway.learner.filtering import FilteredBatch, TrainStatus
from trackway.learner.head import Measure, TokenLogits, token_logprobs
from trackway.learner.learner import Learner
from trackway.learner.loss import MicroLoss, at_mask
from trackway.learner.measuring import Metrics, spread
from trackway.learner.policy_losses import LossInputs, policy_loss_of
from trackway.trainer.calls.protobuf import LOSSES, Array, Datum, ForwardBackward
from trackway.trainer.calls.results import digest_of
from trackway.trainer.run_state.folder import TOKEN_VALUES
from trackway.trainer.run_state.trajectories import write_token_values, write_trajectories
from trackway.wire.chat import Message
from trackway.wire.trajectory import StopReason, Tags, Trajectory, Turn, trajectory_id

NEVER = 1e9
"""A bound above every probability ratio, whose logarithm is clamped to 20."""

BYTES_OF_ACTIVATION = 2 * 34
"""Bytes in float32 that a token leaves in each layer for each hidden unit: 34 with 16 bits, by
https://arxiv.org/abs/2205.05198, equation 2 without the attention scores, which are not kept."""
MAX_ACTIVATIONS = 2**30
"""Bytes up to which activations are kept for the backward pass rather than computed again."""

_POLICY_LOSSES = {
    "cross_entropy": "gpg",  # -w log p
    "importance_sampling": "vanilla",  # without a clip range
    "ppo": "vanilla",
    "cispo": "cispo",
    "dro": "dro",
    "gspo": "gspo",
}


class LossOutput(NamedTuple):
    """The outcome of a request."""

    logprobs: list[Array]
    """Float32, [N] or [N, K] of each datum: the policy's logprobs of its targets."""
    loss: float
    """The sum of the loss."""


def forward_backward(learner: Learner, request: ForwardBackward) -> LossOutput:
    """Add the gradient of the request's loss to the policy's, unless it is forward only."""
    batch = batch_of(request, learner.policy.master_dtype)
    columns = 1 if batch.target_ids.dim() == 2 else batch.target_ids.shape[2]
    measures = [token_logprobs] if batch.target_ids.dim() == 2 else [_logprobs_of(column) for column in range(columns)]
    config = loss_config(learner.config, request)
    policy_loss = policy_loss_of(_POLICY_LOSSES[request.loss_fn])
    totals = Aggregation.over(batch.response_mask, "token-sum")
    size, tokens = learner.policy.model.config.get_text_config(), int(batch.attention_mask.sum())
    activations = tokens * size.num_hidden_layers * size.hidden_size * BYTES_OF_ACTIVATION
    # In evaluation mode transformers keeps the activations. Without dropout the modes do not differ otherwise.
    learner.policy.model.train(learner.config.model.enable_gradient_checkpointing and activations > MAX_ACTIVATIONS)

    def loss(micro: TrainingBatch, rows: Tensor, values: Sequence[Tensor]) -> MicroLoss:
        mask, weights = micro.response_mask, micro.advantages.reshape(*micro.response_mask.shape, -1)
        total = torch.zeros((), dtype=values[0].dtype, device=values[0].device)
        for column, value in enumerate(values):
            logp = at_mask(mask, value)
            inputs = LossInputs(logp, micro.old_logprobs, weights[..., column], mask, totals, None, micro.selected)
            total = total + policy_loss(config, inputs)[0]
        logp = torch.stack([value.detach() for value in values], dim=-1)
        return MicroLoss(total, {}, logp, logp.new_zeros(0))

    with torch.set_grad_enabled(not request.forward_only):
        passes, parts = learner.forward_backward(batch, measures, loss)
    logprobs: dict[int, Array] = {}
    for micro, part in zip(passes, parts, strict=True):
        lengths = micro.batch.response_mask.sum(1).tolist()
        for row, values in zip(micro.rows.tolist(), part.logp.float().cpu().split(lengths), strict=True):
            shape = request.data[row].targets.shape
            logprobs[row] = values.numpy()[:, : 1 if len(shape) == 1 else shape[1]].reshape(shape)
    total = float(sum(part.loss.double() for part in parts))
    return LossOutput([logprobs[row] for row in range(len(request.data))], total)


def weights_of(loss_fn: str) -> str:
    """Name of the input that weights the tokens of a loss."""
    return "weights" if LOSSES[loss_fn].is_weighted else "advantages"


def loss_config(config: LearnerConfig, request: ForwardBackward) -> LearnerConfig:
    """The configuration with the options of the request's loss. Thresholds are absolute bounds of the ratio."""
    options, unclipped = request.options, {"clip_low_threshold": 0.0, "clip_high_threshold": NEVER}
    bounds = {**unclipped, **options}
    values = {
        "clip_ratio_low": 1.0 - bounds["clip_low_threshold"],
        "clip_ratio_high": bounds["clip_high_threshold"] - 1.0,
        "clip_ratio_c": NEVER,
        "policy_loss.dro_beta": options.get("beta"),
    }
    return replace(config, actor=config.actor.with_values(values))


def batch_of(request: ForwardBackward, dtype: torch.dtype) -> TrainingBatch:
    """The request's data as a batch whose every input token predicts its targets.

    `advantages` are the data's, or the weights of cross_entropy, `old_logprobs` the sampler's logprobs, and `selected`
    the tokens of gspo's sequence ratio. Data of fewer than K targets are padded with weights of 0.
    """
    data = request.data
    lengths = torch.tensor([len(datum.tokens) for datum in data])
    shape = (len(data), int(lengths.max()))
    widths = {datum.targets.shape[1:] for datum in data}
    wide = shape if widths == {()} else (*shape, max(width[0] if width else 1 for width in widths))

    def padded(values: Callable[[int], Array], size: tuple[int, ...], kind: torch.dtype) -> Tensor:
        tensor = torch.zeros(size, dtype=kind)
        for row in range(len(data)):
            value = torch.from_numpy(np.ascontiguousarray(values(row))).to(kind)
            value = value.reshape(len(value), -1) if len(size) == 3 else value
            tensor[(row, *(slice(0, length) for length in value.shape))] = value
        return tensor

    name = weights_of(request.loss_fn)
    zeros = torch.zeros(shape, dtype=dtype)
    ids = padded(lambda row: data[row].tokens, shape, torch.int64)
    mask = torch.arange(shape[1]) < lengths.unsqueeze(-1)
    has_logprobs, has_ratio = "logprobs" in data[0].inputs, request.loss_fn == "gspo"
    return TrainingBatch(
        input_ids=torch.nn.functional.pad(ids, (0, 1)),
        attention_mask=torch.arange(shape[1] + 1) <= lengths.unsqueeze(-1),
        response_mask=mask,
        old_logprobs=padded(lambda row: data[row].inputs["logprobs"], shape, dtype) if has_logprobs else zeros,
        ref_logprobs=zeros,
        advantages=padded(lambda row: data[row].inputs[name], wide, dtype),
        lengths=lengths + 1,
        targets=padded(lambda row: data[row].targets, wide, torch.int64),
        selected=padded(lambda row: data[row].inputs["sequence_ratio_mask"] != 0, shape, torch.bool)
        if has_ratio
        else None,
    )


def _logprobs_of(column: int) -> Measure:
    def measure(tokens: TokenLogits) -> Tensor:
        return token_logprobs(tokens._replace(targets=tokens.targets[:, column]))

    return measure


AGENT = "tinker"
"""Name of the agent of these trajectories. The caller's own loop has no name."""
PROMPT_DIGITS = 10
"""Digits of the digest that names a prompt."""

Text = Callable[[Sequence[int]], str]
"""Decodes token ids."""


class TrainedDatum(NamedTuple):
    """A datum of one target for each token, and the policy's logprobs [N] of the targets."""

    loss_fn: str
    datum: Datum
    logprobs: Array
    traceparent: str
    """Span of the first sample that the datum names, or else the trace of its request. Empty when nothing is traced."""

    @property
    def weights(self) -> Array:
        """[N]: the advantages, or the weights of cross_entropy."""
        return self.datum.inputs[weights_of(self.loss_fn)]

    @property
    def own(self) -> Array:
        """[N]: True for the model's tokens, which have a weight. If all weights are 0, they have a logprob."""
        weights = self.weights
        return (weights if weights.any() else self.datum.inputs.get("logprobs", weights)) != 0

    @property
    def start(self) -> int:
        """Place of the model's first token. The tokens before are the prompt."""
        own = np.flatnonzero(self.own)
        return int(own[0]) if len(own) else len(self.weights) - 1


def trained_data(
    request: ForwardBackward, output: LossOutput, samples: Mapping[str, str], traceparent: str
) -> list[TrainedDatum]:
    """The data of a request. Those of several targets for a token are left out.

    `samples` are the spans of sampled sequences by their ids, and `traceparent` is the trace of the request.
    """
    return [
        TrainedDatum(request.loss_fn, datum, logprobs, samples.get(next(iter(datum.samples), ""), traceparent))
        for datum, logprobs in zip(request.data, output.logprobs, strict=True)
        if datum.targets.ndim == 1
    ]


def step_metrics(data: Sequence[TrainedDatum]) -> Metrics:
    """Advantages of the model's tokens, lengths and counts, by the names of the fit loop."""
    weighted = [trained for trained in data if not LOSSES[trained.loss_fn].is_weighted]
    return {
        **spread(
            "critic/advantages", [value for trained in weighted for value in trained.weights[trained.own].tolist()]
        ),
        **spread("prompt_length", [trained.start + 1 for trained in data]),
        **spread("response_length", [len(trained.weights) - trained.start for trained in data]),
        "training/trained_tokens": float(sum(np.count_nonzero(trained.weights) for trained in data)),
        "training/trajectories": float(len(data)),
    }


def write_step(folder: Path, step: int, data: Sequence[TrainedDatum], text: Text | None = None) -> list[Trajectory]:
    """Write the trajectories of a step and the values of their tokens, and return them. Raises StorageError.

    Without `text` the trajectories have no messages.
    """
    if not data:
        return []
    trajectories = trajectories_of(folder.name, step, data, text)
    write_trajectories(folder / "trajectories" / f"step_{step}.parquet", trajectories)
    batch = FilteredBatch(trajectories, [TrainStatus.USED] * len(data))

    def flat(values: Sequence[Array]) -> torch.Tensor:
        return torch.from_numpy(np.concatenate(values).astype(np.float32))

    weights = flat([trained.weights[trained.start :] for trained in data])
    logprobs = flat([trained.logprobs[trained.start :] for trained in data])
    kept = flat([trained.own[trained.start :] for trained in data]) != 0
    values = TokenValues(
        lengths=[len(trained.weights) - trained.start for trained in data],
        logprobs=logprobs.masked_fill(~kept, torch.nan),
        entropies=torch.full_like(weights, torch.nan),
        advantages=weights.masked_fill(~kept, torch.nan),
        clipped=torch.zeros_like(kept),
        kept=kept,
    )
    write_token_values(folder / TOKEN_VALUES / f"step_{step}.parquet", step, batch, values)
    return trajectories


def trajectories_of(run: str, step: int, data: Sequence[TrainedDatum], text: Text | None = None) -> list[Trajectory]:
    """The data as trajectories without a reward. Those of one prompt are rollouts of one sample, in every step.

    The mask has the model's tokens. `session_id` is the first sampled sequence that the datum names.
    """
    rollouts: dict[str, int] = {}
    found: list[Trajectory] = []
    for trained in data:
        datum, start = trained.datum, trained.start
        prompt, response = datum.tokens[: start + 1].tolist(), datum.targets[start:].tolist()
        sample = digest_of(str(prompt))[:PROMPT_DIGITS]
        rollouts[sample] = rollouts.get(sample, -1) + 1
        tags = Tags(experiment_name=run, step=step, sample_index=sample, rollout_n=rollouts[sample])
        turns = [] if text is None else _turns(trained.own[start:], response, text)
        trace_id, span_id = _recorded(trained.traceparent)
        found.append(
            Trajectory(
                id=trajectory_id(run, tags),
                session_id=datum.samples[0] if datum.samples else "",
                tags=tags,
                agent_name=AGENT,
                data_source=trained.loss_fn,
                prompt_ids=prompt,
                response_ids=response,
                response_mask=trained.own[start:].astype(int).tolist(),
                response_logprobs=datum.inputs.get("logprobs", trained.logprobs)[start:].astype(float).tolist(),
                prompt_messages=[] if text is None else [Message(role="user", content=text(prompt))],
                turns=turns,
                num_turns=2 * max(1, len(turns)),
                stop_reason=StopReason.ANSWERED,
                trace_id=trace_id,
                span_id=span_id,
            )
        )
    return found


def _turns(own: Array, response: list[int], text: Text) -> list[Turn]:
    """A turn for each run of the model's tokens, with the text that the caller put behind it."""
    edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), len(own)]
    runs, turns = list(pairwise(edges)), list[Turn]()
    for (start, end), behind in zip_longest(runs[::2], runs[1::2]):
        messages = [Message(role="assistant", content=text(response[start:end]))]
        if behind is not None:
            messages.append(Message(role="user", content=text(response[slice(*behind)])))
        turn = Turn(index=len(turns), messages=messages, response_start=start, response_end=end, finish_reason="")
        turns.append(turn)
    return turns


def _recorded(traceparent: str) -> tuple[str, str] | tuple[None, None]:
    """The ids of the trace and the span, if the span is recorded."""
    _, trace_id, span_id, flags = (traceparent or "0-0-0-0").split("-")
    return (trace_id, span_id) if int(flags, 16) % 2 else (None, None)
