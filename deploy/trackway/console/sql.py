"""SQL of a user over one run: a single SELECT, which reads the run's files and nothing else.

Files and settings are protected twice. The statement's syntax tree may name only the views below and harmless
functions; and its own DuckDB, made for it, may open only the run's files and keeps its settings locked.

    trajectories    a row per rollout, with `validation`
    calls           a row per tool call: step, sample_index, rollout_n, tool, seconds, reward, error, arguments, result
    token_values    a row per row of tokens that an update read, with its status (`trackway.save_token_values`)
    tokens          a row per response token of these
"""

import json
import math
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trackway.console.replies import SqlColumn, SqlPage
from trackway.console.trajectory_files import token_value_files, trajectory_files
from trackway.trainer.run_state.folder import RunFolder
from trackway.wire.errors import ErrorCode, TrackwayError

if TYPE_CHECKING:
    import duckdb

DEADLINE_S = 20.0
_INTERRUPT_AGAIN_S = 0.05
MOST_ROWS = 1000
MEMORY = "200MB"
_MOST_CHARS = 2000
"""Characters of one value."""
_MOST_REPLY_CHARS = 4_000_000
_MOST_DAMAGED = 5
"""Damaged files that a query is tried again without."""

_TABLES = frozenset({"trajectories", "calls", "token_values", "tokens"})
_TABLE_FUNCTIONS = frozenset({"unnest", "range", "generate_series", "json_each", "json_tree"})
_REFUSED_FUNCTIONS = frozenset({"current_setting", "getenv", "getvariable", "write_log", "current_database", "version"})
_CALL = "json_extract_string(call, '$.{}')"
_CALLS = f"""
CREATE VIEW calls AS SELECT step, sample_index, rollout_n, validation, score, {_CALL.format("tool")} AS tool,
CAST({_CALL.format("seconds")} AS DOUBLE) AS seconds, CAST({_CALL.format("reward")} AS DOUBLE) AS reward,
{_CALL.format("error")} AS error, json_extract_string([m FOR m IN json_extract(json_extract(turns,
'$[*].messages')[turn], '$[*]') IF json_extract_string(m, '$.tool_call_id') = {_CALL.format("tool_call_id")}][1],
'$.content') AS result FROM (SELECT *, unnest(json_extract(of_turn, '$[*]')) AS call FROM (SELECT *, unnest(by_turn)
AS of_turn, generate_subscripts(by_turn, 1) AS turn FROM (SELECT *, json_extract(turns, '$[*].calls') AS by_turn FROM
trajectories)))
"""
"""Calls are taken out of the JSON without their turns, whose texts may be long; these are read for results alone."""
_TOKENS = """
CREATE VIEW tokens AS SELECT v.step, v.sample_index, v.rollout_n, unnest(range(len(v.logprobs))) AS place,
unnest(t.response_ids) AS token_id, unnest(t.response_logprobs) AS sampler_logprob, unnest(v.logprobs) AS logprob,
unnest(v.entropies) AS entropy, unnest(v.advantages) AS advantage, unnest(v.clipped) AS clipped, unnest(v.kept) AS kept
FROM token_values v JOIN trajectories t ON t.step = v.step AND t.sample_index = v.sample_index
AND t.rollout_n = v.rollout_n AND NOT t.validation WHERE v.row = 0 AND v.logprobs IS NOT NULL
"""
_NO_VALUES = (
    "SELECT NULL::BIGINT AS step, NULL::VARCHAR AS sample_index, NULL::BIGINT AS rollout_n, NULL::BIGINT AS row, "
    "NULL::VARCHAR AS status, NULL::FLOAT[] AS logprobs, NULL::FLOAT[] AS entropies, NULL::FLOAT[] AS advantages, "
    "NULL::BOOLEAN[] AS clipped, NULL::BOOLEAN[] AS kept WHERE false"
)


class Statement:
    """One SELECT over one run; `run` once, `cancel` from any thread."""

    def __init__(self, folder: RunFolder, sql: str) -> None:
        self._folder, self._sql = folder, sql
        self._lock = threading.Lock()
        self._connection: duckdb.DuckDBPyConnection | None = None
        self._ended_by = ""
        self._asked_to_end, self._ended = threading.Event(), threading.Event()

    def run(self) -> SqlPage:
        """The first MOST_ROWS rows, after at most DEADLINE_S.

        Raises TrackwayError: INVALID_REQUEST for another statement or one that DuckDB refuses, DEADLINE_EXCEEDED,
        OVERLOADED when it needs more than MEMORY, NOT_FOUND when the run has no trajectories yet.
        """
        watching = threading.Thread(target=self._watch, daemon=True)
        watching.start()
        try:
            return self._page()
        finally:
            self._ended.set()
            self._asked_to_end.set()
            watching.join()

    def cancel(self) -> None:
        """Ends a query that runs; `run` then raises DEADLINE_EXCEEDED."""
        self._ended_by = self._ended_by or "was cancelled"
        self._asked_to_end.set()

    def _watch(self) -> None:
        """Interrupts the query at its deadline or when it is cancelled."""
        if not self._asked_to_end.wait(DEADLINE_S):
            self._ended_by = self._ended_by or f"took longer than {DEADLINE_S:.0f} s"
        while not self._ended.is_set():
            with self._lock:
                if self._connection is not None:
                    self._connection.interrupt()
            self._ended.wait(_INTERRUPT_AGAIN_S)  # DuckDB forgets an interrupt that comes before the query has begun

    def _page(self) -> SqlPage:
        import duckdb

        trajectories = [file.path for file in trajectory_files(self._folder)]
        values = token_value_files(self._folder)
        unreadable: list[str] = []
        while True:
            if not trajectories:
                message = (
                    f"expected trajectories of run {self._folder.name}, got none that can be read; wait for a step"
                )
                raise TrackwayError(ErrorCode.NOT_FOUND, message)
            try:
                return self._rows(trajectories, values, unreadable)
            except duckdb.InterruptException as error:
                message = f"the query {self._ended_by}; name fewer steps (WHERE step = ...) or fewer columns"
                raise TrackwayError(ErrorCode.DEADLINE_EXCEEDED, message) from error
            except duckdb.OutOfMemoryException as error:
                message = f"expected a query of at most {MEMORY} of memory, got more; name fewer steps or fewer columns"
                raise TrackwayError(ErrorCode.OVERLOADED, f"{message} (WHERE step = ...)") from error
            except duckdb.Error as error:
                damaged = [path for path in (*trajectories, *values) if str(path) in str(error)]
                if not damaged or len(unreadable) == _MOST_DAMAGED:
                    raise _refused(str(error)) from error
                unreadable.append(str(error).partition("\n")[0])
                trajectories = [path for path in trajectories if path not in damaged]
                values = [path for path in values if path not in damaged]

    def _rows(self, trajectories: list[Path], values: list[Path], unreadable: list[str]) -> SqlPage:
        connection = _connection(trajectories, values)
        try:
            _check(connection, self._sql)
            with self._lock:
                self._connection = connection
            # The line break ends a comment of the user's last line.
            found = connection.execute(f"SELECT * FROM ({self._sql.rstrip().rstrip(';')}\n) LIMIT {MOST_ROWS + 1}")
            columns = [SqlColumn(name=name, type=str(kind)) for name, kind, *_ in found.description or ()]
            rows, is_whole, is_cut = _bounded(found)
            return SqlPage(columns=columns, rows=rows, truncated=not is_whole, cut=is_cut, unreadable=unreadable)
        finally:
            with self._lock:
                self._connection = None
            connection.close()


def _connection(trajectories: list[Path], values: list[Path]) -> "duckdb.DuckDBPyConnection":
    """A DuckDB of its own with the views, which opens these files only."""
    import duckdb

    connection = duckdb.connect(
        config={
            "memory_limit": MEMORY,
            "threads": 1,
            "temp_directory": "",  # nothing is spilled to a disk
            "autoinstall_known_extensions": False,
            "autoload_known_extensions": False,
            "python_enable_replacements": False,
        }
    )
    connection.execute(f"SET allowed_paths = [{_quoted([*trajectories, *values])}]")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    connection.execute(
        "CREATE VIEW trajectories AS SELECT * EXCLUDE (filename) REPLACE (CAST(sample_index AS VARCHAR) AS "
        r"sample_index), regexp_matches(filename, '/val_step_\d+[.]parquet$') AS validation "
        f"FROM read_parquet([{_quoted(trajectories)}], union_by_name = true, filename = true)"
    )
    source = f"SELECT * FROM read_parquet([{_quoted(values)}], union_by_name = true)" if values else _NO_VALUES
    connection.execute(f"CREATE VIEW token_values AS {source}")
    connection.execute(_CALLS)
    connection.execute(_TOKENS)
    return connection


def _quoted(paths: list[Path]) -> str:
    return ", ".join("'" + str(path).replace("'", "''") + "'" for path in paths)


def _check(connection: "duckdb.DuckDBPyConnection", sql: str) -> None:
    """Raises TrackwayError unless the text is one SELECT over the views, with functions that reach nothing else."""
    [(text,)] = connection.execute("SELECT json_serialize_sql($sql)", {"sql": sql}).fetchall()
    tree = json.loads(text)
    if tree["error"]:
        raise _refused(tree["error_message"])
    if len(tree["statements"]) != 1:
        raise _refused(f"{len(tree['statements'])} statements")
    nodes = list(_nodes(tree))
    ctes = {entry["key"].lower() for node in nodes for entry in _ctes(node)}
    # A CTE ends with its subquery: outside of that its name would be the file's or the system's.
    system = {name for (name,) in connection.execute("SELECT view_name FROM duckdb_views() WHERE internal").fetchall()}
    for name in ctes:
        if name in system or not name.isidentifier():
            raise _refused(f"the name {name} of a CTE")
    named = _TABLES | ctes
    for node in nodes:
        kind = node.get("type")
        if kind == "BASE_TABLE" and (node.get("schema_name") or node["table_name"].lower() not in named):
            raise _refused(f"the table {node['table_name']}")
        if kind == "TABLE_FUNCTION" and node["function"]["function_name"].lower() not in _TABLE_FUNCTIONS:
            raise _refused(f"the table function {node['function']['function_name']}")
        if kind == "SHOW_REF" or (node.get("function_name") or "").lower() in _REFUSED_FUNCTIONS:
            raise _refused(node.get("function_name") or "DESCRIBE or SHOW")


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _nodes(part)


def _ctes(node: dict[str, Any]) -> list[dict[str, Any]]:
    ctes = node.get("cte_map")
    return ctes["map"] if isinstance(ctes, dict) else []


def _refused(reason: str) -> TrackwayError:
    tables = ", ".join(sorted(_TABLES))
    message = (
        f"expected one SELECT over {tables}, got {reason}; files, settings and other statements are not open to it"
    )
    return TrackwayError(ErrorCode.INVALID_REQUEST, message)


def _bounded(found: "duckdb.DuckDBPyConnection") -> tuple[list[list[Any]], bool, bool]:
    """The rows as JSON values, whether these are all, and whether a text was cut.

    MOST_ROWS and _MOST_REPLY_CHARS bound the rows.
    """
    rows: list[list[Any]] = []
    chars, is_cut = 0, False
    while row := found.fetchone():
        cells = [_cell(value) for value in row]
        chars += sum(len(cell) for cell in cells if isinstance(cell, str))
        if len(rows) == MOST_ROWS or chars > _MOST_REPLY_CHARS:
            return rows, False, is_cut
        rows.append(cells)
        is_cut = is_cut or any(isinstance(cell, str) and len(cell) > _MOST_CHARS for cell in cells)
    return rows, True, is_cut


def _cell(value: object) -> str | int | float | bool | None:
    """A number that JSON and JavaScript have, or a text of at most _MOST_CHARS."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int) and abs(value) < 2**53:
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    text = value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= _MOST_CHARS else f"{text[:_MOST_CHARS]}…"
