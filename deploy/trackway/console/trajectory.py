"""One trajectory: its conversation, its tokens, and their texts by the model's tokenizer."""

import heapq
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ValidationError

from trackway.console.replies import (
    GroupMember,
    LearnerTokens,
    RankedToken,
    TokensPage,
    TrajectoryAddress,
    TrajectoryPage,
)
from trackway.console.runs import finite, mlflow_page, weave_page
from trackway.console.steps import ORDER
from trackway.console.trajectory_files import File, ParquetReader, file_of, token_values_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import from_record
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory, WeightSpan

if TYPE_CHECKING:
    from tokenizers import Tokenizer


_MOST = 4
"""Tokenizers kept in memory."""
_BEFORE = 8
"""Tokens before the shown ones that are decoded with them, as a character may begin there."""


class Tokenizers:
    """Loads `tokenizer.json` of the folder `actor_rollout_ref.model.path`. Nothing is downloaded."""

    def __init__(self) -> None:
        self._loaded: dict[Path, Tokenizer | None] = {}

    def pieces(self, folder: RunFolder, ids: Sequence[int], shown: range) -> list[str] | None:
        """The text that each of the shown tokens adds, or None without a tokenizer or without the package `tokenizers`.

        A token that ends within a character adds nothing, and the one that completes it adds the character.
        """
        path = _path(folder)
        if path is None:
            return None
        if path not in self._loaded:
            if len(self._loaded) >= _MOST:
                self._loaded.clear()
            self._loaded[path] = _load(path)
        tokenizer = self._loaded[path]
        if tokenizer is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream, start = DecodeStream(skip_special_tokens=False), max(0, shown.start - _BEFORE)
        pieces = [stream.step(tokenizer, token) or "" for token in ids[start : shown.stop]]
        return pieces[shown.start - start :]


def _path(folder: RunFolder) -> Path | None:
    # RunFolder.config() needs Hydra, which the console does without.
    try:
        config = json.loads((folder.path / "config.json").read_bytes())
        path = Path(config["actor_rollout_ref"]["model"]["path"]) / "tokenizer.json"
        return path if path.is_file() else None
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _load(path: Path) -> "Tokenizer | None":
    try:
        from tokenizers import Tokenizer
    except ModuleNotFoundError:
        return None
    try:
        return Tokenizer.from_file(str(path))
    except Exception:  # what a damaged file raises is a bare Exception
        return None


MOST_CHARS = 100_000
"""Characters of one text; a longer one loses its middle."""
MOST_TOKENS = 4096
"""Tokens of one reply."""
MOST_RANKED = 8
Rank = Literal["logprob", "learner", "difference", "entropy", "advantage", "teacher"]
"""Measure that tokens are ranked by. The sampler's log-probability where the learner's values are missing."""
_ORDER: dict[Rank, Callable[[float], float]] = {
    "logprob": lambda value: value,
    "learner": lambda value: value,
    "difference": lambda value: -abs(value),
    "entropy": lambda value: -value,
    "advantage": lambda value: -abs(value),
    "teacher": lambda value: -abs(value),
}
"""The least of these comes first."""
_WHERE = "CAST(sample_index AS VARCHAR) = $sample AND rollout_n = $rollout"


def read_trajectory(reader: ParquetReader, folder: RunFolder, address: TrajectoryAddress) -> Trajectory:
    """The trajectory at an address. Raises TrackwayError: NOT_FOUND, or CONFLICT when it cannot be read."""
    file = file_of(folder, address.step, address.validation)
    records = reader.records(
        f"SELECT * FROM read_parquet($file) WHERE {_WHERE} LIMIT 1",
        file,
        sample=address.sample,
        rollout=address.rollout,
    )
    if not records:
        message = (
            f"expected a rollout of step {address.step}, got sample {address.sample!r}, rollout {address.rollout}; "
            "open the step to choose one"
        )
        raise TrackwayError(ErrorCode.NOT_FOUND, message)
    try:
        return from_record({name: value for name, value in records[0].items() if value is not None})
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, first["loc"]))
        message = f"expected a trajectory in {file.path}, got a row that does not fit ({place}: {first['msg']})"
        raise TrackwayError(ErrorCode.CONFLICT, f"{message}; look at another rollout") from error


def trajectory_page(reader: ParquetReader, folder: RunFolder, address: TrajectoryAddress) -> TrajectoryPage:
    """The trajectory with its neighbours and its group. Raises TrackwayError as `read_trajectory` does."""
    trajectory = read_trajectory(reader, folder, address)
    file = file_of(folder, address.step, address.validation)
    previous, following = _neighbours(reader, file, address)
    group = reader.query(
        "SELECT rollout_n, score, json_extract_string(error, '$.code'), is_baseline FROM read_parquet($file) "
        "WHERE CAST(sample_index AS VARCHAR) = $sample ORDER BY rollout_n",
        file,
        sample=address.sample,
    )
    messages, usage = _Shortener(), trajectory.usage
    return TrajectoryPage(
        id=trajectory.id,
        address=address,
        previous=previous,
        next=following,
        group=[
            GroupMember(
                rollout=rollout,
                score=None if score is None else finite(score),
                error=error,
                is_baseline=is_baseline,
            )
            for rollout, score, error, is_baseline in group
        ],
        agent_name=trajectory.agent_name,
        data_source=trajectory.data_source,
        stop_reason=trajectory.stop_reason,
        num_turns=trajectory.num_turns,
        prompt_messages=messages.all(trajectory.prompt_messages),
        turns=[turn.model_copy(update={"messages": messages.all(turn.messages)}) for turn in trajectory.turns],
        reward=trajectory.reward,
        ground_truth=None if trajectory.ground_truth is None else messages.text(trajectory.ground_truth),
        tool_rewards=trajectory.tool_rewards,
        timings={"total": trajectory.timings.total, **trajectory.timings.parts},
        incidents=[incident.value for incident in trajectory.incidents],
        incident_services={incident.value: names for incident, names in trajectory.incident_services.items()},
        weight_versions=trajectory.weight_versions,
        error=trajectory.error,
        log=messages.text(trajectory.log),
        prompt_tokens=usage.prompt_tokens if usage else len(trajectory.prompt_ids),
        response_tokens=usage.response_tokens if usage else len(trajectory.response_ids),
        model_tokens=usage.generated_tokens if usage else sum(trajectory.response_mask),
        rows=1 + len(trajectory.further_rows),
        trace=mlflow_page(folder, trajectory.trace_id) if trajectory.trace_id else None,
        weave=weave_page(folder, trajectory.span_id) if trajectory.span_id else None,
        trace_id=trajectory.trace_id,
        shortened=messages.shortened,
    )


def tokens_page(
    reader: ParquetReader,
    folder: RunFolder,
    tokenizers: Tokenizers,
    address: TrajectoryAddress,
    row: int,
    offset: int,
    limit: int,
    place: int | None = None,
    rank: Rank = "logprob",
) -> TokensPage:
    """Tokens of a row of the trajectory. `place` names the page with a token of the response instead of `offset`.

    Raises TrackwayError as `read_trajectory` does.
    """
    rows = read_trajectory(reader, folder, address).rows
    if row >= len(rows):
        message = f"expected a row of tokens from 0 to {len(rows) - 1}, got {row}; choose one of them"
        raise TrackwayError(ErrorCode.NOT_FOUND, message)
    tokens, prompt = rows[row], len(rows[row].prompt_ids)
    ids = [*tokens.prompt_ids, *tokens.response_ids]
    # A token was sampled if its span of a weight version covers it, whatever the mask says.
    versions = [None] * prompt + _versions(tokens.weight_versions, len(tokens.response_ids))
    mask = [0] * prompt + list(tokens.response_mask)
    logprobs = [None] * prompt + [finite(value) for value in tokens.response_logprobs]
    logprobs = [
        logprob if is_trained or version is not None else None
        for logprob, is_trained, version in zip(logprobs, mask, versions, strict=True)
    ]
    if place is not None:
        offset = (prompt + place) // limit * limit
    shown = slice(offset, offset + limit)
    learner, unreadable = _learner_tokens(reader, folder, address, row, prompt)
    teacher = _teachers(tokens)
    ranked = _ranked(rank, logprobs, learner, teacher)

    def pieces(first: int, last: int) -> list[str] | None:
        return tokenizers.pieces(folder, ids, range(first, last))

    def piece(index: int) -> str | None:
        found = pieces(index, index + 1)
        return found[0] if found else None

    return TokensPage(
        row=row,
        rows=len(rows),
        total=len(ids),
        offset=offset,
        prompt_tokens=prompt,
        ids=ids[shown],
        pieces=pieces(offset, offset + limit),
        mask=mask[shown],
        logprobs=logprobs[shown],
        versions=versions[shown],
        teacher=teacher[shown],
        learner=learner and _part(learner, shown),
        ranked=[RankedToken(place=at, id=ids[at], piece=piece(at), value=value) for at, value in ranked],
        unreadable=unreadable,
    )


def _teachers(tokens: Trajectory) -> list[float | None]:
    """The teacher's logprobs of a row, prompt included. Empty without a teacher."""
    if tokens.teacher is None:
        return []
    scored = iter(tokens.teacher.logprobs)
    return [None] * len(tokens.prompt_ids) + [next(scored, None) if is_own else None for is_own in tokens.response_mask]


def _less(values: list[float | None], others: list[float | None]) -> list[float | None]:
    """Values less others, where both are known."""
    return [
        None if value is None or other is None else value - other for value, other in zip(values, others, strict=True)
    ]


def _ranked(
    rank: Rank, logprobs: list[float | None], learner: LearnerTokens | None, teacher: list[float | None]
) -> list[tuple[int, float]]:
    """The places and values of the first MOST_RANKED tokens."""
    values = _less(teacher, logprobs) if rank == "teacher" and teacher else logprobs
    if learner is not None and learner.logprobs and values is logprobs:
        by_rank = {"learner": learner.logprobs, "difference": _less(learner.logprobs, logprobs)}
        by_rank |= {"entropy": learner.entropies, "advantage": learner.advantages}
        values = by_rank.get(rank, logprobs)
    known = ((index, value) for index, value in enumerate(values) if value is not None)
    order = _ORDER[rank if values is not logprobs else "logprob"]
    return heapq.nsmallest(MOST_RANKED, known, key=lambda item: (order(item[1]), item[0]))


def _part(learner: LearnerTokens, shown: slice) -> LearnerTokens:
    columns = ("logprobs", "entropies", "advantages", "clipped", "kept")
    return learner.model_copy(update={name: getattr(learner, name)[shown] for name in columns})


def _learner_tokens(
    reader: ParquetReader, folder: RunFolder, address: TrajectoryAddress, row: int, prompt: int
) -> tuple[LearnerTokens | None, str]:
    """Values that the update computed of the row's tokens, if on disk, and why they cannot be read."""
    file = token_values_of(folder, address.step)
    if address.validation or file is None:
        return None, ""
    try:
        found = reader.query(
            "SELECT status, logprobs, entropies, advantages, clipped, kept FROM read_parquet($file) "
            "WHERE sample_index = $sample AND rollout_n = $rollout AND row = $row",
            file,
            sample=address.sample,
            rollout=address.rollout,
            row=row,
        )
    except TrackwayError as error:
        return None, error.message
    if not found:
        return None, ""
    status, logprobs, entropies, advantages, clipped, kept = found[0]

    def numbers(values: list[float] | None) -> list[float | None]:
        return [] if values is None else [None] * prompt + [finite(value) for value in values]

    def flags(values: list[bool] | None) -> list[bool]:
        return [] if values is None else [False] * prompt + values

    tokens = LearnerTokens(
        status=status,
        logprobs=numbers(logprobs),
        entropies=numbers(entropies),
        advantages=numbers(advantages),
        clipped=flags(clipped),
        kept=flags(kept),
    )
    return tokens, ""


def _versions(spans: Sequence[WeightSpan], length: int) -> list[int | None]:
    versions: list[int | None] = [None] * length
    for span in spans:
        for index in range(max(0, span.start), min(span.end, length)):
            versions[index] = span.version
    return versions


def _neighbours(
    reader: ParquetReader, file: File, address: TrajectoryAddress
) -> tuple[TrajectoryAddress | None, TrajectoryAddress | None]:
    """The rollouts before and after this one, across prompts."""
    found: list[tuple[Any, ...]] = reader.query(
        "SELECT before, rollout_before, after, rollout_after FROM ("
        "SELECT CAST(sample_index AS VARCHAR) AS sample_index, rollout_n, "
        f"lag(CAST(sample_index AS VARCHAR)) OVER w AS before, lag(rollout_n) OVER w AS rollout_before, "
        f"lead(CAST(sample_index AS VARCHAR)) OVER w AS after, lead(rollout_n) OVER w AS rollout_after "
        f"FROM read_parquet($file) WINDOW w AS (ORDER BY {ORDER})) WHERE {_WHERE} LIMIT 1",
        file,
        sample=address.sample,
        rollout=address.rollout,
    )
    before, rollout_before, after, rollout_after = found[0]

    def of(sample: str | None, rollout: int) -> TrajectoryAddress | None:
        return None if sample is None else address.model_copy(update={"sample": sample, "rollout": rollout})

    return of(before, rollout_before), of(after, rollout_after)


class _Shortener:
    """Cuts long texts, and remembers whether it did."""

    def __init__(self) -> None:
        self.shortened = False

    def text(self, text: str) -> str:
        if len(text) <= MOST_CHARS:
            return text
        self.shortened = True
        half = MOST_CHARS // 2
        return f"{text[:half]}\n… {len(text) - 2 * half} characters …\n{text[-half:]}"

    def all(self, messages: Sequence[Message]) -> list[Message]:
        return [message.model_copy(update={"content": self.text(message.content)}) for message in messages]
