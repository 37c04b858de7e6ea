"""One trajectory: its conversation, its tokens and their texts, and its spans from the run's MLflow server."""

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
from trackway.console.steps import ORDER, advantages_of
from trackway.console.trajectory_files import File, ParquetReader, file_of, token_values_of
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import from_record
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory, WeightSpan

if TYPE_CHECKING:
    from tokenizers import Tokenizer
import base64
import os
from collections.abc import Mapping

import httpx

from trackway.console.replies import SpanBar, SpansPage
from trackway.tracing import attributes as names
from trackway.tracing import conventions
from trackway.tracing.export.backends import condition, credentials, mlflow_http

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
    is_scored = any(score is not None for _, score, *_ in group)
    advantages = {} if is_scored or address.validation else advantages_of(reader, folder, address.step)
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
                advantage=advantages.get((address.sample, rollout)),
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
        span_id=trajectory.span_id,
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


TIMEOUT_S = 10.0
MOST_SPANS = 500
MOST_TRACES = 5000


def spans_page(folder: RunFolder, trace_id: str, span_id: str = "") -> SpansPage:
    """The spans in the order of their starts, each with its depth. Of a step's trace, only those from `span_id` down.

    Raises TrackwayError: NOT_FOUND without an MLflow server or the trace, UNAVAILABLE when MLflow does not answer.
    """
    traces = _asked(folder, "GET", "batchGet", params={"trace_ids": f"tr-{trace_id}"}).get("traces", [])
    spans: list[Mapping[str, Any]] = traces[0].get("spans", []) if traces else []
    if not spans:
        message = f"expected trace {trace_id} in MLflow at {folder.info().mlflow_uri}, got none; was it deleted?"
        raise TrackwayError(ErrorCode.NOT_FOUND, message)
    tags = traces[0].get("trace_info", {}).get("tags", {})
    return _page(_from(span_id, spans) if names.TRAIN_STEP in tags else spans)


def traces_with(folder: RunFolder, span: str) -> list[str]:
    """Return the ids of the traces with a span of this name, where `*` matches any text: the newest MOST_TRACES.

    Raises TrackwayError: as `spans_page`, and INVALID_REQUEST for a name that MLflow cannot search for.
    """
    place = {"type": "MLFLOW_EXPERIMENT", "mlflow_experiment": {"experiment_id": folder.info().experiment_id}}
    try:
        body: dict[str, Any] = {"locations": [place], "max_results": 500, "filter": condition("span.name", span)}
    except ValueError as error:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, f"span: {error}") from error
    found: list[str] = []
    while len(found) < MOST_TRACES:
        reply = _asked(folder, "POST", "search", json=body)
        found += [trace["trace_id"].removeprefix("tr-") for trace in reply.get("traces", [])]
        if not (token := reply.get("next_page_token")):
            break
        body["page_token"] = token
    return found


def _asked(folder: RunFolder, method: str, call: str, **content: Any) -> dict[str, Any]:
    uri = folder.info().mlflow_uri or ""
    if not uri.startswith(("http://", "https://")):
        raise TrackwayError(ErrorCode.NOT_FOUND, f"expected an MLflow server of run {folder.name}, got {uri or 'none'}")
    # The address is from a file of the run, which may be another's: the password is for ours alone.
    headers = credentials() if uri == os.environ.get("MLFLOW_TRACKING_URI") else {}
    url = f"{uri.rstrip('/')}/api/3.0/mlflow/traces/{call}"
    try:
        with mlflow_http(uri, TIMEOUT_S) as http:
            return http.request(method, url, headers=headers, **content).raise_for_status().json()
    except (httpx.HTTPError, ValueError) as error:
        got = error or type(error).__name__
        message = f"expected an answer of MLflow at {uri}, got {got}; start its server with `trackway ui`"
        raise TrackwayError(ErrorCode.UNAVAILABLE, message) from error


def _from(span_id: str, spans: list[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The span and those below it. All spans if it is not among them."""
    parents = {_hex(span["span_id"]): _hex(span.get("parent_span_id")) for span in spans}

    def is_below(own: str) -> bool:
        while own and own != span_id:
            own = parents.get(own, "")
        return bool(own)

    return [span for span in spans if is_below(_hex(span["span_id"]))] or spans


def _page(spans: list[Mapping[str, Any]]) -> SpansPage:
    ordered = sorted(spans, key=lambda span: int(span["start_time_unix_nano"]))
    start = int(ordered[0]["start_time_unix_nano"])
    parents = {_hex(span["span_id"]): _hex(span.get("parent_span_id")) for span in spans}

    def depth(span_id: str) -> int:
        found = 0
        while (span_id := parents.get(span_id, "")) in parents and found < MOST_SPANS:
            found += 1
        return found

    bars = [
        SpanBar(
            name=span["name"],
            **_facts(span),
            depth=depth(_hex(span["span_id"])),
            start=(int(span["start_time_unix_nano"]) - start) / 1e9,
            seconds=(int(end) - int(span["start_time_unix_nano"])) / 1e9
            if (end := span.get("end_time_unix_nano"))
            else None,
            error=span.get("status", {}).get("message", "")
            if span.get("status", {}).get("code") == "STATUS_CODE_ERROR"
            else "",
        )
        for span in ordered[:MOST_SPANS]
    ]
    return SpansPage(spans=bars, total=len(spans))


def _facts(span: Mapping[str, Any]) -> dict[str, str]:
    values = {pair["key"]: next(iter(pair.get("value", {}).values()), None) for pair in span.get("attributes", [])}
    known = conventions.as_our_own(values)
    prompt, written = known.get(names.INPUT_TOKENS), known.get(names.OUTPUT_TOKENS)
    tokens = None if prompt is None or written is None else f"{prompt} → {written} tokens"
    facts = (str(fact) for fact in (known.get(names.MODEL), known.get(names.TOOL_NAME), tokens) if fact)
    return {
        "service": str(values.get(names.SERVICE, "")),
        "kind": conventions.work_of(values),
        "about": ", ".join(fact for fact in facts if fact not in span["name"]),
    }


def _hex(id_base64: str | None) -> str:
    return base64.b64decode(id_base64).hex() if id_base64 else ""
