"""SQL over a run: its answers, its bounds, and what it must never reach."""

import threading
from pathlib import Path

import duckdb
import pytest
from fastapi.testclient import TestClient

from tests.console.example_run import rollout, write_run, write_values
from trackway.console import sql
from trackway.console.app import create_app
from trackway.console.sql import Statement
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import write_trajectories
from trackway.wire.errors import ErrorCode, TrackwayError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    folder = write_run(tmp_path_factory.mktemp("outputs"))
    write_values(folder, 2)
    return folder


def rows(folder: RunFolder, text: str) -> list[list[str | int | float | bool | None]]:
    return Statement(folder, text).run().rows


def refusal(folder: RunFolder, text: str) -> str:
    with pytest.raises(TrackwayError) as caught:
        Statement(folder, text).run()
    assert caught.value.code is ErrorCode.INVALID_REQUEST
    return caught.value.message


def test_a_select_has_the_rows_of_the_run(folder: RunFolder) -> None:
    found = rows(folder, "SELECT step, avg(score) FROM trajectories WHERE NOT validation GROUP BY step ORDER BY step;")
    assert found == [[1, 1 / 3], [2, 1 / 3]]
    assert rows(
        folder, "SELECT tool, error, result, seconds FROM calls WHERE step = 2 AND error IS NOT NULL -- one"
    ) == [["calculator", "tool_timeout", "42", 0.25]]
    assert rows(folder, "SELECT rollout_n, status FROM token_values ORDER BY sample_index, rollout_n") == [
        [0, "error"],
        [1, "stale"],
        [0, "used"],
        [1, "used"],
    ]
    most = "SELECT place, token_id, sampler_logprob - logprob AS difference FROM tokens WHERE NOT isnan(logprob)"
    assert rows(folder, f"WITH found AS ({most}) SELECT * FROM found ORDER BY difference DESC LIMIT 1") == [[3, 6, 1.5]]


def test_a_result_is_that_of_its_own_turn(tmp_path: Path) -> None:
    made = rollout("tidy", 1, 7, 0)
    again = made.turns[0].model_copy(deep=True, update={"index": 1, "response_start": 2, "response_end": 2})
    again.messages[1].content = "43"
    made.turns.insert(1, again)
    folder = write_run(tmp_path, steps=0)
    write_trajectories(folder.path / "trajectories/step_1.parquet", [made])

    assert rows(folder, "SELECT tool, result FROM calls WHERE step = 1") == [["calculator", "42"], ["calculator", "43"]]


def test_calls_beside_long_texts_need_little_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MEMORY", "128MB")
    made = [rollout("tidy", 1, 7, n) for n in range(1000)]
    for number, trajectory in enumerate(made):
        trajectory.turns[0].messages[0].content = f"{number} " + "so we add " * 2000
    folder = write_run(tmp_path, steps=0)
    write_trajectories(folder.path / "trajectories/step_1.parquet", made)

    query = "SELECT tool, count(*), sum(seconds) FROM calls WHERE NOT validation GROUP BY tool"
    assert rows(folder, query) == [["calculator", 1000, 250.0]]


def test_a_query_that_needs_more_memory_says_how_to_need_less(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "MEMORY", "30MB")
    with pytest.raises(TrackwayError, match="at most 30MB of memory, got more; name fewer steps") as caught:
        rows(folder, "SELECT count(DISTINCT repeat(i::VARCHAR, 50)) FROM range(3000000) t(i)")
    assert caught.value.code is ErrorCode.OVERLOADED


def test_a_reply_is_bounded_and_every_value_is_json(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sql, "MOST_ROWS", 3)
    page = Statement(
        folder, "SELECT i, 'nan'::DOUBLE, [1, 2], DATE '2026-01-02', repeat('x', 3000) FROM range(9) t(i)"
    ).run()

    assert (len(page.rows), page.truncated, page.cut) == (3, True, True)
    assert page.rows[0][:4] == [0, None, "[1, 2]", '"2026-01-02"'] and len(str(page.rows[0][4])) == 2001


def test_a_run_without_token_values_has_empty_tables_of_them(tmp_path: Path) -> None:
    assert rows(write_run(tmp_path), "SELECT * FROM tokens UNION ALL BY NAME SELECT * FROM token_values") == []


REFUSED = [
    "SELECT * FROM read_csv('{secret}')",
    "SELECT * FROM read_text('{secret}')",
    "SELECT * FROM '{secret}'",
    "SELECT * FROM glob('/etc/*')",
    "FROM query('SELECT 1')",
    "WITH a AS (SELECT * FROM read_blob('{secret}')) SELECT * FROM a",
    "SELECT (SELECT content FROM read_text('{secret}'))",
    "COPY (SELECT 1) TO '{target}'",
    "COPY trajectories TO '{target}'",
    "ATTACH '{target}'",
    "INSTALL httpfs",
    "LOAD httpfs",
    "SET memory_limit = '9GB'",
    "RESET lock_configuration",
    "PRAGMA database_list",
    "CREATE TABLE t AS SELECT 1",
    "CREATE OR REPLACE VIEW trajectories AS SELECT 1",
    "DROP VIEW trajectories",
    "EXPORT DATABASE '{target}'",
    "CALL pragma_version()",
    "SELECT * FROM duckdb_settings()",
    "SELECT * FROM duckdb_secrets()",
    "SELECT * FROM (WITH duckdb_tables AS (SELECT 1) FROM duckdb_tables) a, duckdb_tables",
    'SELECT * FROM (WITH "{secret}" AS (SELECT 1) FROM "{secret}") a, \'{secret}\'',
    "SELECT current_setting('memory_limit')",
    "SELECT getenv('HOME')",
    "SELECT * FROM information_schema.tables",
    "SELECT * FROM pg_catalog.pg_settings",
    "SELECT 1; COPY (SELECT 1) TO '{target}'",
    "SELECT 1) TO '{target}' --",
    "SELECT 1; SELECT 2",
    "DESCRIBE trajectories",
    "FROM (SHOW TABLES)",
    "",
]


def test_nothing_but_one_select_over_the_run_is_let_through(folder: RunFolder, tmp_path: Path) -> None:
    secret, target = tmp_path / "secret.txt", tmp_path / "target"
    secret.write_text("a,b\n1,2\n")
    connection = duckdb.connect()

    for text in REFUSED:
        with pytest.raises(TrackwayError) as caught:
            sql._check(connection, text.format(secret=secret, target=target))
        assert caught.value.message.startswith(
            "expected one SELECT over calls, token_values, tokens, trajectories, got "
        )
    assert (
        refusal(folder, f"SELECT * FROM read_text('{secret}')").partition("got ")[2].startswith("the table function ")
    )
    assert not target.exists()


def test_its_duckdb_opens_no_other_file_even_where_the_statement_was_not_checked(
    folder: RunFolder, tmp_path: Path
) -> None:
    secret, target = tmp_path / "secret.txt", tmp_path / "target"
    secret.write_text("a,b\n1,2\n")
    connection = sql._connection([folder.path / "trajectories/step_1.parquet"], [])

    for text in (
        f"SELECT * FROM read_text('{secret}')",
        f"COPY (SELECT 1) TO '{target}'",
        f"ATTACH '{target}'",
        "INSTALL httpfs",
        "SET enable_external_access = true",
        "SET memory_limit = '9GB'",
        f"SET allowed_paths = ['{secret}']",
    ):
        with pytest.raises(duckdb.Error):
            connection.execute(text).fetchall()
    assert not target.exists()
    assert connection.execute("SELECT count(*) FROM trajectories").fetchall() == [(4,)]


SLOW = "SELECT count(*) FROM range(100000000) a, range(100000) b WHERE a.range + b.range = -1"


def test_a_query_ends_at_its_deadline_and_when_it_is_cancelled(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sql, "DEADLINE_S", 0.05)
    with pytest.raises(TrackwayError, match="took longer than 0 s; name fewer steps") as caught:
        Statement(folder, SLOW).run()
    assert caught.value.code is ErrorCode.DEADLINE_EXCEEDED
    monkeypatch.setattr(sql, "DEADLINE_S", 30.0)
    early, late = Statement(folder, SLOW), Statement(folder, SLOW)
    early.cancel()  # DuckDB forgets an interrupt before the query has begun
    threading.Timer(0.05, late.cancel).start()
    for statement in (early, late):
        with pytest.raises(TrackwayError, match="was cancelled"):
            statement.run()


def test_a_torn_file_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path)
    file = folder.path / "trajectories/step_2.parquet"
    file.write_bytes(file.read_bytes()[:2000])

    page = Statement(folder, "SELECT count(*) FROM trajectories").run()

    assert page.rows == [[5]] and len(page.unreadable) == 1 and str(file) in page.unreadable[0]


def test_the_route_answers_with_rows_and_says_what_is_wrong(folder: RunFolder) -> None:
    client = TestClient(create_app(folder.path.parent))

    def asked(query: str) -> dict:
        return client.get("/api/sql", params={"run": "tidy", "query": query}).json()

    page = asked("SELECT count(*) AS n FROM trajectories")
    assert page == {
        "columns": [{"name": "n", "type": "BIGINT"}],
        "rows": [[9]],
        "truncated": False,
        "cut": False,
        "unreadable": [],
    }
    assert "no_such" in asked("SELECT no_such FROM trajectories")["error"]["message"]
    assert asked("SELEC 1")["error"]["code"] == "invalid_request"
