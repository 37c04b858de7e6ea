"""Search over the trajectories of a run: the newest step first, a page at a time; failures as SQL."""

import json
import math
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from trackway.console.replies import Hit, SearchPage, TrajectoryAddress
from trackway.console.runs import finite
from trackway.console.trajectory_files import File, ParquetReader, trajectory_files
from trackway.learner.filtering import INFRASTRUCTURE
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ERRORS, ErrorCode, ModelSees, TrackwayError
from trackway.wire.service import ServiceName
from trackway.wire.trajectory import Incident

_CODE = "json_extract_string(error, '$.code')"
_SEEN = ", ".join(f"'{code}'" for code, spec in ERRORS.items() if spec.model_sees is ModelSees.YES)
_FAILED = "error <> 'null'"
_ENDED_BY = (
    "json_extract_string([call FOR call IN json_extract(turns, '$[*].calls[*]') IF "
    f"json_extract_string(call, '$.error') = {_CODE} AND {_CODE} NOT IN ({_SEEN})][-1], '$.tool')"
)
"""The tool whose call ended the rollout."""
_CALL_CODE = "json_extract_string(call, '$.error')"
CALL_MESSAGE = "coalesce(json_extract_string(call, '$.message'), '')"
_CALL_CODES = "json_extract_string(turns, '$[*].calls[*].error')"
IS_INCIDENT = (
    f"incident IS DISTINCT FROM {_CODE} AND NOT list_contains({_CALL_CODES}, incident) AND NOT (incident = "
    f"'{Incident.TOOL_FAILED}' AND len([code FOR code IN {_CALL_CODES} IF code <> '{Incident.TOOL_TIMEOUT}']) > 0)"
)
"""True if an `incident` of a row is no failure of one of its calls or of the rollout."""
CALLED = "CAST(CAST(incident_services AS JSON) AS MAP(VARCHAR, VARCHAR[]))[incident]"
"""Services that were called at an `incident` of a row. Null where the row does not say."""
FAILURES = {
    "trajectory": (
        f"{_CODE} AS code, {_ENDED_BY} AS tool, json_extract_string(error, '$.message') AS message, '' AS called",
        _FAILED,
    ),
    "call": (
        f"{_CALL_CODE} AS code, json_extract_string(call, '$.tool') AS tool, {CALL_MESSAGE} AS message, '' AS called",
        f"{_CALL_CODE} IS NOT NULL AND NOT ({_FAILED} AND {_CALL_CODE} = {_CODE} AND {_CALL_CODE} NOT IN ({_SEEN}))",
    ),
    "incident": (
        "incident AS code, NULL AS tool, '' AS message, service AS called",
        IS_INCIDENT,
    ),
}
"""Code, tool, message and called service of each kind of failure, and its condition. A failure has one kind: a call
that ended its rollout is the rollout's, and what a call or a rollout failed by is no incident of it."""


def pattern_of(message: str) -> str:
    """SQL of what messages of one cause have in common: the first 300 characters, with N for each number."""
    return f"regexp_replace(left({message}, 300), '[0-9]+([.][0-9]+)?', 'N', 'g')"


_AT = re.compile(rf"\b({'|'.join(get_args(ServiceName))})\b")
_BY_CODE = {
    "rollout": (
        ErrorCode.ENGINE_FAILED,
        ErrorCode.WEIGHTS_BEHIND,
        ErrorCode.WEIGHTS_CORRUPT,
        ErrorCode.WEIGHTS_STALE,
        ErrorCode.PAUSED,
    ),
    "tools": (ErrorCode.INSTANCE_LOST, ErrorCode.INSTANCE_NOT_FOUND, ErrorCode.TOOL_FAILED, ErrorCode.TOOL_TIMEOUT),
    "agent": (ErrorCode.AGENT_FAILED,),
    "reward": (ErrorCode.UNKNOWN_DATA_SOURCE,),
}
_INCIDENTS: dict[str, str] = {
    Incident.GENERATION_CUT: "rollout",
    Incident.WEIGHTS_BEHIND: "rollout",
    Incident.PROMPT_CUT: "agent",
    Incident.TOOL_FAILED: "tools",
    Incident.TOOL_TIMEOUT: "tools",
    Incident.INSTANCE_LOST: "tools",
}
_INFRASTRUCTURE_INCIDENTS = frozenset(
    {Incident.RETRIED, Incident.WEIGHTS_BEHIND, Incident.INSTANCE_LOST, Incident.REPLICA_LOST}
)
"""A turn is cut on purpose when weights change, and a prompt and a tool are the run's own."""


def is_infrastructure(kind: str, code: str) -> bool:
    """Return whether a service, a machine or the network failed."""
    return code in (_INFRASTRUCTURE_INCIDENTS if kind == "incident" else INFRASTRUCTURE)


def service_of(kind: str, code: str, tool: str | None, message: str, called: str) -> str:
    """The service that failed: the called one, or by the code if it says so, else the first that the message names."""
    if kind == "incident":
        return called or _INCIDENTS.get(code, "")
    if tool is not None:
        return "tools"
    for service, codes in _BY_CODE.items():
        if code in codes:
            return service
    named = _AT.search(message)
    return named[1] if named else ""


BUDGET_S = 1.0
"""Seconds after which a page ends, with a cursor to go on."""
_MOST_TOGETHER = 16
"""Files read at once while nothing is found; as many as half the budget allows."""
_CHUNK = 256
"""Candidates read at once from a file."""
_MOST_TEXT, _MOST_JSON = 8_000_000, 40_000_000
"""Bytes of turns that are read at once for an expression, whose texts are taken out of the JSON, and for calls."""
_MOST_STATES = 500
"""States of an expression. RE2 takes up to 15 ns for each state and byte, and DuckDB does not interrupt it."""
_MOST_STEPS = 80_000_000
"""States times bytes of one query: about a second."""
_REGEX_PART = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(\d+)(?:,(\d*))?\}|[()]|.", re.DOTALL)
_EVERY = 2**62
"""More rows than a file has."""
_AROUND = 60
"""Characters of a snippet before and after a match."""
_MOST_MATCH = 200
"""Characters of a match. A longer one loses its end."""


@dataclass(frozen=True)
class Query:
    """Conditions on a trajectory. None and the empty text allow any."""

    text: str = ""
    """Text of a message, a tool call or an error, in any case."""
    is_regex: bool = False
    """True if `text` is a regular expression (RE2) over each of these texts; `(?-i)` in it minds the case."""
    tool: str = ""
    """Name of a called tool. With `error`, of a call that failed so."""
    error: str = ""
    """Code of an error that ended the rollout, or of a failed call."""
    message: str = ""
    """Beginning of the message of the error that ended the rollout, or with `tool` of a failed call, N for each number:
    a group of Failures."""
    incident: str = ""
    """A problem from which the rollout recovered, and which is no failure of one of its calls."""
    service: str = ""
    """With `incident`: the service that was called."""
    tool_was_right: bool = False
    """A call got a reward from its tool, or its result is the answer of a rollout of the same prompt with a higher
    score, above 0."""
    stop_reason: str = ""
    least: float | None = None
    """Least score."""
    most: float | None = None
    """Greatest score."""
    first_step: int | None = None
    last_step: int | None = None
    validation: bool | None = None
    traces: list[str] | None = None
    """Ids of the traces that it may have."""


def search(reader: ParquetReader, folder: RunFolder, query: Query, limit: int, cursor: str | None) -> SearchPage:
    """A page of hits: at most `limit`, from the files that could be searched in BUDGET_S. Raises TrackwayError."""
    if query.is_regex:
        reader.check_regex(in_any_case(query.text))
        if states(query.text) > _MOST_STATES:
            message = (
                f"expected an expression of at most {_MOST_STATES} characters, with repetitions such as {{50}} counted "
                f"out, got {states(query.text)}; shorten it, or search for a text in it"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    files = [file for file in reversed(trajectory_files(folder)) if _has_step(query, file)]
    at, row = _place(files, cursor)
    hits: list[Hit] = []
    unreadable: list[str] = []
    started, searched, together = time.monotonic(), 0, 1
    while at < len(files):
        is_alone = query.is_regex or _is_read_in_parts(reader, files[at], query)
        batch = files[at : at + (1 if is_alone else together)]
        matching, damaged = _matching(reader, batch, query) if len(batch) > 1 else (batch, {})
        unreadable += damaged.values()
        before = len(hits)
        for file in matching:
            try:
                for number, hit in _hits(reader, file, query, row):
                    if len(hits) == limit or (hit is None and time.monotonic() - started > BUDGET_S):
                        return _page(hits, searched + batch.index(file) + 1, (file, number), unreadable)
                    hits += [hit] if hit else []
            except TrackwayError as error:
                unreadable.append(error.message)
            row = 0
        at, searched = at + len(batch), searched + len(batch)
        together = 1 if len(hits) > before else min(2 * together, _MOST_TOGETHER)
        if time.monotonic() - started > BUDGET_S and at < len(files):
            return _page(hits, searched, (files[at], 0), unreadable)
    return _page(hits, searched, None, unreadable)


def _matching(reader: ParquetReader, files: list[File], query: Query) -> tuple[list[File], dict[File, str]]:
    """The files that may have a hit, read in parallel, and why others cannot be read."""
    where, values = _conditions(query)
    rows, unreadable = reader.across(
        f"SELECT DISTINCT filename FROM read_parquet($files, union_by_name = true, filename = true) WHERE true{where}",
        files,
        **values,
    )
    found = {file for file, _ in rows}
    return [file for file in files if file in found], unreadable


def _page(hits: list[Hit], files: int, place: tuple[File, int] | None, unreadable: list[str]) -> SearchPage:
    cursor = None
    if place is not None:
        file, row = place
        cursor = f"{'val' * file.validation}{file.step}.{row}"
    return SearchPage(hits=hits, files=files, cursor=cursor, unreadable=unreadable[:20])


def _place(files: list[File], cursor: str | None) -> tuple[int, int]:
    """Index of the file and of its row at which the search goes on."""
    if cursor is None:
        return 0, 0
    name, _, row = cursor.partition(".")
    step = name.removeprefix("val")
    if not (step.isascii() and step.isdigit() and row.isascii() and row.isdigit()):
        message = f"expected a cursor of an earlier page, got {cursor!r}; search again"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    place = (int(step), name != step)
    for index, file in enumerate(files):
        if (file.step, file.validation) == place:
            return index, int(row)
        if (file.step, file.validation) < place:  # that file is gone
            return index, 0
    return len(files), 0


def _has_step(query: Query, file: File) -> bool:
    return (
        (query.first_step is None or file.step >= query.first_step)
        and (query.last_step is None or file.step <= query.last_step)
        and query.validation in (None, file.validation)
    )


def _hits(reader: ParquetReader, file: File, query: Query, start: int) -> Iterator[tuple[int, Hit | None]]:
    """The matching trajectories from a row of the file on, each with the number of its row; None between two parts."""
    where, values = _conditions(query)
    match = f"left(regexp_extract({_MATCHING}[1], $regex), {_MOST_MATCH})" if query.is_regex else "''"
    part, count = _part(reader, file, query)
    answers = _right_answers(reader, file, part, count) if query.tool_was_right else {}
    source = "read_parquet($file, file_row_number = true)"
    if part < count:
        source = _rows_of_part(source)
    while start < count:
        end = start + part
        rows = reader.records(
            "SELECT file_row_number AS number, CAST(sample_index AS VARCHAR) AS sample, rollout_n AS rollout, score, "
            f"stop_reason, error, turns, prompt_messages, log, {match} AS match "
            f"FROM {source} WHERE file_row_number >= $start AND file_row_number < $end{where} "
            f"ORDER BY number LIMIT {_CHUNK}",
            file,
            start=start,
            end=end,
            **values,
        )
        for row in rows:
            if query.tool_was_right and not _tool_was_right(row, answers.get(row["sample"], [])):
                continue
            hit = _hit(file, row, query)
            if hit is not None:
                yield row["number"], hit
        start = end if len(rows) < _CHUNK else rows[-1]["number"] + 1
        if start < count:
            yield start, None


def _rows_of_part(source: str) -> str:
    """SQL of the rows from `$start` to `$end`, taken before anything is taken out of their JSON."""
    rows = f"SELECT * FROM {source} WHERE file_row_number >= $start AND file_row_number < $end"
    return f"(WITH part AS MATERIALIZED ({rows}) SELECT * FROM part)"


def _part(reader: ParquetReader, file: File, query: Query) -> tuple[int, int]:
    """Rows of a file that are read at once, and all of them. No bounds for queries that take nothing out of JSON."""
    if not (query.is_regex or query.tool or query.error or query.incident or query.tool_was_right):
        return _EVERY, _EVERY
    if query.is_regex:  # by characters: a file has the same prompt once
        [(size, count)] = reader.query(f"SELECT coalesce(sum({_SIZE}), 0), count(*) FROM read_parquet($file)", file)
        part = max(1, count * min(_MOST_TEXT, _MOST_STEPS // states(query.text)) // max(1, int(size)))
    else:
        part, count = reader.rows_within(file, _MOST_JSON, "turns")
    return (part, count) if count else (_EVERY, _EVERY)


def _is_read_in_parts(reader: ParquetReader, file: File, query: Query) -> bool:
    try:
        part, count = _part(reader, file, query)
    except TrackwayError:
        return False  # told by the query itself
    return part < count


_TEXTS = (
    "list_concat(json_extract_string(prompt_messages, '$[*].content'), "
    "json_extract_string(turns, '$[*].messages[*].content'), "
    "json_extract_string(turns, '$[*].messages[*].tool_calls[*].function.name'), "
    "json_extract_string(turns, '$[*].messages[*].tool_calls[*].function.arguments'), "
    "[json_extract_string(error, '$.message'), log])"
)
_SIZE = "strlen(turns) + strlen(prompt_messages) + coalesce(strlen(error), 0) + coalesce(strlen(log), 0)"
_MATCHING = f"[text FOR text IN {_TEXTS} IF regexp_matches(text, $regex)]"
"""The texts of a row that match. DuckDB's RE2 takes linear time. Python's `re` need not end."""
_MESSAGE = "json_extract_string(error, '$.message')"
_CALLS = "json_extract(turns, '$[*].calls[*]')"


def _conditions(query: Query) -> tuple[str, dict[str, object]]:
    """SQL that leaves at least the matching rows, and its values. `_hit` checks the text of these."""
    conditions: list[str] = []
    values: dict[str, object] = {}

    def add(condition: str, **more: object) -> None:
        conditions.append(condition)
        values.update(more)

    if query.text and query.is_regex:
        add(f"len({_MATCHING}) > 0", regex=in_any_case(query.text))
    elif query.text:
        # Arguments of calls are JSON within JSON.
        once = json.dumps(query.text.lower(), ensure_ascii=False)[1:-1]
        twice = json.dumps(once, ensure_ascii=False)[1:-1]
        found = [f"contains(lower({name}), $once)" for name in ("turns", "prompt_messages", "error")]
        plain = query.text.lower()
        if once == plain:
            found.append("contains(lower(log), $once)")
        else:
            found.append("contains(lower(log), $plain)")
            values["plain"] = plain
        if twice != once:
            found.append("contains(lower(turns), $twice)")
            values["twice"] = twice
        add(f"({' OR '.join(found)})", once=once)
    if query.tool and query.error:
        alike = f" AND {pattern_of(CALL_MESSAGE)} = $message" if query.message else ""
        add(
            f"len([call FOR call IN {_CALLS} IF json_extract_string(call, '$.tool') = $tool "
            f"AND json_extract_string(call, '$.error') = $error{alike}]) > 0",
            tool=query.tool,
            error=query.error,
            **({"message": query.message} if query.message else {}),
        )
    elif query.tool:
        add("list_contains(json_extract_string(turns, '$[*].calls[*].tool'), $tool)", tool=query.tool)
    elif query.error and query.message:
        add("json_extract_string(error, '$.code') = $error", error=query.error)
    elif query.error:
        add(
            "(json_extract_string(error, '$.code') = $error OR "
            "list_contains(json_extract_string(turns, '$[*].calls[*].error'), $error))",
            error=query.error,
        )
    if query.message and not (query.tool and query.error):
        add(f"{pattern_of(_MESSAGE)} = $message", message=query.message)
    if query.incident:
        called = f" AND list_contains({CALLED}, $service)" if query.service else ""
        add(
            f"len([incident FOR incident IN incidents IF incident = $incident AND {IS_INCIDENT}{called}]) > 0",
            incident=query.incident,
            **({"service": query.service} if query.service else {}),
        )
    if query.stop_reason:
        add("stop_reason = $stop_reason", stop_reason=query.stop_reason)
    if query.tool_was_right:
        add(f"len({_CALLS}) > 0")
    if query.least is not None:
        add("score >= $least", least=query.least)
    if query.most is not None:
        add("score <= $most", most=query.most)
    if query.traces is not None:
        add("list_contains($traces, trace_id)", traces=query.traces)
    return "".join(f" AND {condition}" for condition in conditions), values


def _hit(file: File, row: dict[str, Any], query: Query) -> Hit | None:
    """The row as a hit, or None when only its JSON contains the text, such as the name of a field."""
    turns = json.loads(row["turns"])
    error = json.loads(row["error"])
    texts = [*_texts(json.loads(row["prompt_messages"])), *_texts(m for turn in turns for m in turn["messages"])]
    texts += [error["message"]] if error else []
    texts += [row["log"]] if row["log"] else []
    found = _snippet(texts, row["match"].lower() if query.is_regex else query.text.lower())
    if found is None:
        return None
    snippet, match = found
    return Hit(
        address=TrajectoryAddress(
            step=file.step, validation=file.validation, sample=row["sample"], rollout=row["rollout"]
        ),
        score=None if row["score"] is None else finite(row["score"]),
        stop_reason=row["stop_reason"],
        error=error["code"] if error else None,
        tools=list(dict.fromkeys(call["tool"] for turn in turns for call in turn["calls"])),
        snippet=snippet,
        match=match,
    )


def states(regex: str) -> int:
    """About how many states RE2 makes of an expression that it accepts: repetitions such as `{50}` are written out."""
    groups: list[int] = []  # the states before each open group
    total = last = 0  # of the group so far, and of its last part, which a repetition repeats
    for part in _REGEX_PART.finditer(regex):
        if part[0] == "(":
            groups.append(total)
            total = last = 0
        elif part[0] == ")" and groups:
            total, last = groups.pop() + total + 1, total + 1
        elif part[1] is not None:
            repeated = last * max(int(part[1]), int(part[2] or 0), 1)
            total, last = total + repeated - last, repeated
        else:
            total, last = total + 1, 1
    return max(1, total)


def in_any_case(regex: str) -> str:
    """The expression, which minds the case only where it says so itself."""
    return f"(?i){regex}"


def _right_answers(reader: ParquetReader, file: File, part: int, count: int) -> dict[str, list[tuple[float, set[str]]]]:
    """Scores above 0 by sample, each with the words of the answer that got it."""
    answers: dict[str, list[tuple[float, set[str]]]] = {}
    source = _rows_of_part("read_parquet($file, file_row_number = true)")
    for start in range(0, count, part):
        rows = reader.query(
            "SELECT DISTINCT CAST(sample_index AS VARCHAR), score, "
            f"json_extract_string(turns, '$[*].messages[*].content')[-1] FROM {source} WHERE score > 0",
            file,
            start=start,
            end=start + part,
        )
        for sample, score, answer in rows:
            answers.setdefault(sample, []).append((score, set((answer or "").split())))
    return answers


def _tool_was_right(row: dict[str, Any], answers: list[tuple[float, set[str]]]) -> bool:
    """Return whether a call of the row got a reward, or its result is a word of a better answer."""
    score = -math.inf if row["score"] is None else row["score"]
    better = [words for other, words in answers if other > score]
    for turn in json.loads(row["turns"]):
        right = {call["tool_call_id"] for call in turn["calls"] if call["reward"] > 0}
        failed = {call["tool_call_id"] for call in turn["calls"] if call["error"]}
        for message in turn["messages"]:
            call_id = message["tool_call_id"]
            if message["role"] != "tool" or call_id in failed:
                continue
            if call_id in right or any(message["content"].strip() in words for words in better):
                return True
    return False


def _texts(messages: Iterator[dict[str, Any]] | list[dict[str, Any]]) -> Iterator[str]:
    for message in messages:
        yield message["content"]
        for call in message["tool_calls"] or ():
            yield f"{call['function']['name']} {call['function']['arguments']}"


def _snippet(texts: list[str], text: str) -> tuple[str, str] | None:
    """Text around the first match, and the match as it is written there."""
    if not text:
        return next((found[-2 * _AROUND :] for found in reversed(texts) if found.strip()), ""), ""
    for found in texts:
        at = found.lower().find(text)
        if at >= 0:
            match = found[at : at + min(len(text), _MOST_MATCH)]
            start, end = max(0, at - _AROUND), at + len(match) + _AROUND
            around = f"{'…' * (start > 0)}{found[start:end]}{'…' * (end < len(found))}"
            return around, match
    return None
