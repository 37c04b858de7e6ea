"""From trajectories to tensors, at exact positions.

A trajectory is the token row `prompt_ids + response_ids` of length L = P + R, padded on the right to the longest row T.
A causal model's output at position t predicts the token at t + 1, so everything about predicted tokens is [B, T - 1]
and response token i (0-based) lies in column P - 1 + i:

    column        0 ... P-2 | P-1 ... P+R-2 | P+R-1 ...
    predicts      prompt    | response      | padding
    response_mask 0         | as sampled    | 0
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import count
from typing import Self, TypeAlias

import torch
from torch import Tensor

from trackway.learner.algorithm import by_token
from trackway.learner.head import TopTokens
from trackway.wire.trajectory import Trajectory

MaskedTokens: TypeAlias = tuple[list[int], list[int]]
"""The token ids of a row, and a mask of the same length, which is 1 for tokens to train on."""


@dataclass(frozen=True)
class TrainingBatch:
    """B trajectories as tensors. T is the longest row, columns of [B, T - 1] are those of the module's picture."""

    input_ids: Tensor
    """[B, T] int64: prompt, response, then zeros."""
    attention_mask: Tensor
    """[B, T] bool: True on prompt and response."""
    response_mask: Tensor
    """[B, T - 1] bool: True where the predicted token was written by the model."""
    old_logprobs: Tensor
    """[B, T - 1]: the policy's logprob of the predicted token before the update. 0 where the mask is False."""
    ref_logprobs: Tensor
    """[B, T - 1]: the reference model's logprobs. Zeros until they are computed."""
    advantages: Tensor
    """[B], or [B, T - 1] where tokens have their own."""
    lengths: Tensor
    """[B] int64: prompt and response tokens of the row."""
    rollout_is_weights: Tensor | None = None
    """[B, T - 1]: importance weight of each predicted token, or None for 1."""
    loglinear_share: Tensor | None = None
    """[B, T - 1]: the trained policy's share in the estimated old logprobs, which `old_logprobs`, then the sampler's,
    have the rest of. None to take `old_logprobs` as they are."""

    selected: Tensor | None = None
    """[B, T - 1] bool: tokens that `clip_cov` or `kl_cov` treats apart, or tokens of `gspo`'s mean ratio where a
    call names them. None otherwise."""
    owners: Tensor | None = None
    """[B] int64: number of each row's trajectory, or None where each row is a whole one."""
    values: Tensor | None = None
    """[B, T - 1]: the value before each predicted token, by the value model before the update, or None without one."""
    returns: Tensor | None = None
    """[B, T - 1]: what these values are trained towards."""
    targets: Tensor | None = None
    """[B, T - 1] or [B, T - 1, K] int64: one or K predicted tokens at each place. None for the row's next token."""
    teacher_logprobs: Tensor | None = None
    """[B, T - 1]: a teacher's logprob of the predicted token, or None without one."""
    teacher_top_ids: Tensor | None = None
    """[B, T - 1, k] int64: the teacher's most likely tokens, zeros outside the response mask, or None."""
    teacher_top_logprobs: Tensor | None = None
    """[B, T - 1, k]: their logprobs."""

    @classmethod
    def of(
        cls, trajectories: Sequence[Trajectory], advantages: Sequence[float], dtype: torch.dtype = torch.float32
    ) -> Self:
        """The batch of these trajectories, floats in `dtype`. Each has a prompt and a token of the model's own.

        Raises ValueError on an empty list, unequal lengths, or an empty prompt (nothing predicts its first token).
        """
        _check(trajectories, advantages)
        rows = [(t.prompt_ids + t.response_ids, [0] * len(t.prompt_ids) + t.response_mask) for t in trajectories]
        batch = cls.of_tokens(rows, dtype)
        old_logprobs = torch.zeros_like(batch.old_logprobs)
        for row, trajectory in enumerate(trajectories):
            first = len(trajectory.prompt_ids) - 1
            columns = slice(first, first + len(trajectory.response_ids))
            old_logprobs[row, columns] = torch.tensor(trajectory.response_logprobs, dtype=dtype)
        return replace(
            batch,
            **_teacher_columns(trajectories, batch.response_mask, dtype),
            old_logprobs=old_logprobs * batch.response_mask,
            advantages=torch.tensor(advantages, dtype=dtype),
        )

    @classmethod
    def of_tokens(cls, rows: Sequence[MaskedTokens], dtype: torch.dtype = torch.float32) -> Self:
        """The batch of these rows, floats in `dtype`. Advantages are 1.

        Raises ValueError on an empty list.
        """
        if not rows:
            raise ValueError("expected at least one row, got none; give rows to train on")
        lengths = torch.tensor([len(ids) for ids, _ in rows])
        width = int(lengths.max())
        input_ids = torch.zeros(len(rows), width, dtype=torch.int64)
        response_mask = torch.zeros(len(rows), width - 1, dtype=torch.bool)
        for row, (ids, mask) in enumerate(rows):
            input_ids[row, : len(ids)] = torch.tensor(ids)
            response_mask[row, : len(ids) - 1] = torch.tensor(mask[1:], dtype=torch.bool)
        zeros = torch.zeros(response_mask.shape, dtype=dtype)
        return cls(
            input_ids=input_ids,
            attention_mask=torch.arange(width) < lengths.unsqueeze(-1),
            response_mask=response_mask,
            old_logprobs=zeros,
            ref_logprobs=zeros,
            advantages=torch.ones(len(rows), dtype=dtype),
            lengths=lengths,
        )

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def top_tokens(self) -> TopTokens | None:
        """The teacher's most likely tokens at the response mask, [N, k] in the order of the rows; None without them."""
        if self.teacher_top_ids is None or self.teacher_top_logprobs is None:
            return None
        return TopTokens(self.teacher_top_ids[self.response_mask], self.teacher_top_logprobs[self.response_mask])

    def rows(self, index: Tensor) -> Self:
        """The trajectories at `index` [b] int64, cut to the longest of them."""
        width = int(self.lengths[index].max())
        cut = {name: value[index] for name, value in self._tensors()}
        narrow = {name: value[:, : width - 1] for name, value in cut.items() if value.dim() > 1}
        for name in ("input_ids", "attention_mask"):
            narrow[name] = cut[name][:, :width]
        return type(self)(**(cut | narrow))

    def trainable(self) -> Self:
        """The rows with a model token to train on. Rejection may leave rows without one."""
        has_token = self.response_mask.any(-1)
        return self if bool(has_token.all()) else self.rows(has_token.nonzero().squeeze(-1))

    def to(self, device: torch.device) -> Self:
        """The same batch on a device."""
        return type(self)(**{name: value.to(device) for name, value in self._tensors()})

    @property
    def target_ids(self) -> Tensor:
        """[B, T - 1] or [B, T - 1, K] int64: the predicted tokens."""
        return self.input_ids[:, 1:] if self.targets is None else self.targets

    def _tensors(self) -> list[tuple[str, Tensor]]:
        tensors = ((field.name, getattr(self, field.name)) for field in fields(self))
        return [(name, value) for name, value in tensors if value is not None]


def _teacher_columns(trajectories: Sequence[Trajectory], mask: Tensor, dtype: torch.dtype) -> dict[str, Tensor]:
    """A teacher's scores of these trajectories, in the columns of the response mask; empty unless all have them."""
    scores = [trajectory.teacher for trajectory in trajectories]
    given = [score for score in scores if score is not None]
    if len(given) < len(scores):
        return {}
    logprobs = torch.zeros(mask.shape, dtype=dtype)
    flat = [logprob for score in given for logprob in score.logprobs]
    columns = {"teacher_logprobs": logprobs.masked_scatter(mask, torch.tensor(flat, dtype=dtype))}
    ids = [top for score in given for top in score.top_ids]
    if ids:
        shape = (*mask.shape, len(ids[0]))
        tops = [top for score in given for top in score.top_logprobs]
        for name, values in (
            ("teacher_top_ids", torch.tensor(ids)),
            ("teacher_top_logprobs", torch.tensor(tops, dtype=dtype)),
        ):
            columns[name] = torch.zeros(shape, dtype=values.dtype).masked_scatter(mask.unsqueeze(-1), values)
    return columns


def rows_of(trajectories: Sequence[Trajectory]) -> tuple[list[Trajectory], list[int]]:
    """The token rows of these trajectories, and for each the place of its trajectory among them."""
    rows = [(row, owner) for owner, trajectory in enumerate(trajectories) for row in trajectory.rows]
    return [row for row, _ in rows], [owner for _, owner in rows]


def mini_batches(owners: Sequence[int], size: int, epochs: int, shuffler: torch.Generator | None) -> Iterator[Tensor]:
    """Row indices of each optimizer step, over all epochs. `owners` is the trajectory of each row.

    A mini-batch has `size` trajectories with all their rows, in a new order for each epoch if there is a shuffler.
    """
    rows: list[list[int]] = [[] for _ in range(max(owners) + 1)]
    for row, owner in enumerate(owners):
        rows[owner].append(row)
    for _ in range(epochs):
        order = torch.arange(len(rows)) if shuffler is None else torch.randperm(len(rows), generator=shuffler)
        for part in order.split(size):
            yield torch.tensor([row for owner in part.tolist() for row in rows[owner]])


def placed_scores(trajectories: Sequence[Trajectory], width: int) -> Tensor:
    """[B, width] float64: turn and token scores at their tokens, in the columns of `ResponseColumns.response`."""
    placed = torch.zeros(len(trajectories), width, dtype=torch.float64)
    for place, trajectory in enumerate(trajectories):
        reward, start = trajectory.reward, 0
        if reward is None or not (reward.turn_scores or reward.token_scores):
            continue
        ends: list[int] = []
        for row in trajectory.rows:
            ends += [start + max(turn.response_end - 1, 0) for turn in row.turns]
            start += len(row.response_ids)
        places = ends if reward.turn_scores else list(range(start))
        scores = torch.tensor(reward.turn_scores or reward.token_scores, dtype=torch.float64)
        placed[place].index_add_(0, torch.tensor(places), scores)
    return placed


def token_versions(trajectories: Sequence[Trajectory], width: int, default: float) -> Tensor:
    """[B, width] float64: weight version that sampled each predicted token, in the module's columns.

    `default` where no version was recorded, and outside the response.
    """
    versions = torch.full((len(trajectories), width), default, dtype=torch.float64)
    for row, trajectory in enumerate(trajectories):
        first = len(trajectory.prompt_ids) - 1
        for span in trajectory.weight_versions:
            versions[row, first + span.start : first + span.end] = span.version
    return versions


@dataclass(frozen=True)
class TokenValues:
    """Values that an update computed of the response tokens of N rows, row by row.

    NaN and False stand for what was not computed: no value of a token that the model did not write, no entropy of one
    that is not trained.
    """

    lengths: list[int]
    """Response tokens of each row."""
    logprobs: Tensor
    """Float32: the learner's, under the weights before the update; where the update takes no pass for them, those
    before the optimizer step that trained the token first."""
    entropies: Tensor
    """Float32, in nats: of the learner's distribution of the token at that step."""
    advantages: Tensor
    """Float32."""
    clipped: Tensor
    """Bool: the probability ratio left `clip_ratio`'s range, on the side where PPO's loss has no gradient."""
    kept: Tensor
    """Bool: the token is in the loss; False where `algorithm.rollout_correction` rejected it."""


class TokenRecord:
    """Collects the values of an update's tokens, [N, T - 1] in the module's columns, over its optimizer steps."""

    def __init__(self, batch: TrainingBatch, logprobs: Tensor | None) -> None:
        """`logprobs` are those before the update. None takes them from the steps."""
        nan = torch.full(batch.response_mask.shape, torch.nan)
        self._takes_logprobs = logprobs is None
        self._advantages = batch.advantages.float()
        self._logprobs = nan.clone() if logprobs is None else logprobs.float()
        self._entropies = nan
        self._clipped, self._kept = (torch.zeros_like(batch.response_mask) for _ in range(2))
        self._is_seen = torch.zeros(len(batch), dtype=torch.bool)

    def add(self, index: Tensor, logprobs: Tensor, entropies: Tensor, clipped: Tensor, kept: Tensor) -> None:
        """The values [b, t] of a step on the rows `index` [b]. Of several epochs the first has the values."""
        columns = slice(0, logprobs.shape[1])
        self._clipped[index, columns] |= clipped
        self._kept[index, columns] |= kept
        is_new = ~self._is_seen[index]
        new = index[is_new]
        self._entropies[new, columns] = entropies[is_new].float()
        if self._takes_logprobs:
            self._logprobs[new, columns] = logprobs[is_new].float()
        self._is_seen[new] = True

    def of(self, rows: Sequence[Trajectory]) -> TokenValues:
        """The batch's values at the response tokens of these rows."""
        lengths = [len(row.response_ids) for row in rows]
        starts = [len(row.prompt_ids) - 1 for row in rows]
        places = [(row, slice(start, start + length)) for row, start, length in zip(count(), starts, lengths)]
        is_own = torch.tensor([bool(mask) for row in rows for mask in row.response_mask], dtype=torch.bool)

        def flat(values: Tensor) -> Tensor:
            return torch.cat([values[place] for place in places])

        def numbers(values: Tensor) -> Tensor:
            return flat(values).masked_fill(~is_own, torch.nan)

        # A token that no step trained has a zero in the columns of its row.
        kept = flat(self._kept)
        return TokenValues(
            lengths=lengths,
            logprobs=numbers(self._logprobs),
            entropies=numbers(self._entropies).masked_fill(~kept, torch.nan),
            advantages=numbers(by_token(self._advantages).expand(self._logprobs.shape)),
            clipped=flat(self._clipped),
            kept=kept,
        )


class ResponseColumns:
    """Converts the columns of N rows [N, T - 1] to the response tokens of their B trajectories [B, R], and back.

    R is the longest response. A trajectory of several rows has their responses one after another.
    """

    def __init__(self, rows: Sequence[Trajectory], owners: Sequence[int], width: int) -> None:
        self._shape = (len(rows), width + 1)
        responses: list[list[int]] = [[] for _ in range(max(owners) + 1)]
        for row, (trajectory, owner) in enumerate(zip(rows, owners, strict=True)):
            first = row * (width + 1) + len(trajectory.prompt_ids) - 1
            responses[owner] += range(first, first + len(trajectory.response_ids))
        self._places = torch.full((len(responses), max(map(len, responses))), width)
        """[B, R]: the place of each response token in rows of one more column, which pads the response."""
        for owner, places in enumerate(responses):
            self._places[owner, : len(places)] = torch.tensor(places)

    def response(self, values: Tensor) -> Tensor:
        """[B, R] of values [N, T - 1]; zero after the response."""
        return torch.nn.functional.pad(values, (0, 1)).flatten()[self._places]

    def columns(self, values: Tensor) -> Tensor:
        """[N, T - 1] of values [B, R]; zero outside the responses."""
        padded = torch.zeros(self._shape, dtype=values.dtype).flatten()
        padded[self._places] = values
        return padded.view(self._shape)[:, :-1]


def _check(trajectories: Sequence[Trajectory], advantages: Sequence[float]) -> None:
    if not trajectories:
        raise ValueError(
            "expected at least one trajectory to train on, got none; look at what filter_trajectories() dropped"
        )
    if len(trajectories) != len(advantages):
        raise ValueError(
            f"expected one advantage per trajectory, {len(trajectories)}, got {len(advantages)}; give both in one order"
        )
    for trajectory in trajectories:
        if not trajectory.prompt_ids:
            raise ValueError(
                f"expected a prompt of at least one token, got none in {trajectory.id}; "
                "without one nothing predicts the first response token: start the prompt with a BOS token"
            )
