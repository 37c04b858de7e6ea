"""The Trackio run for real, on this machine: what its own database holds is read back."""

import os
from pathlib import Path
from typing import Any

import pytest

from tests.traces.example_trace import ExampleTrace
from trackway.trainer.config import RunConfig, compose
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectory_dump import write_trajectories
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.tracking import check_loggers, open_tracking
from trackway.wire.chat import Message
from trackway.wire.errors import TrackwayError
from trackway.wire.trainer import MetricsRow

pytestmark = pytest.mark.slow

ROWS = [
    MetricsRow(step=0, data={"val-core/openai/gsm8k/acc/mean@1": 0.25}),
    MetricsRow(step=1, data={"critic/score/mean": 0.5, "timing_s/gen": 1.5, "actor/lr": 1e-6}),
    MetricsRow(step=2, data={"critic/score/mean": 0.75}),
]
TRACES = "actor_rollout_ref.rollout.trace.backend=trackio"
TEXT = "actor_rollout_ref.rollout.trace.token2text=true"


@pytest.fixture(scope="module", autouse=True)
def _database(tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)  # read once, by the import
    import trackio.utils

    assert folder == trackio.utils.TRACKIO_DIR


@pytest.fixture
def project(tmp_path: Path) -> str:
    return tmp_path.name


def config(project: str, *overrides: str) -> RunConfig:
    return compose([f"trainer.project_name={project}", "trainer.experiment_name=qwen2.5-3b_function_rm", *overrides])


def run_folder(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.create(compose([]), ServiceUrls(agent_url="http://a", tools_url="http://t", weights_url="/w"))
    return folder


def tracked(folder: RunFolder, config: RunConfig, *rows: MetricsRow, caught_up: int = 0, redact: str | None = None):
    """One process of the run: the first `caught_up` rows are those of its folder, the others are new."""
    tracking = open_tracking(folder, config, None, redact)
    tracking.catch_up(rows[:caught_up])
    for row in rows[caught_up:]:
        tracking.backends[0].log(row)
    [summary] = tracking.close("FINISHED", 60.0)
    assert (summary.backend, summary.metrics_lost) == ("trackio", 0)


def stored(project: str) -> list[tuple[str | None, list[dict[str, Any]]]]:
    """The name and the rows of each run."""
    from trackio.sqlite_storage import SQLiteStorage

    records = SQLiteStorage.get_run_records(project)
    return [(run["name"], SQLiteStorage.get_logs(project, run["name"], run_id=run["id"])) for run in records]


def metrics(rows: list[dict[str, Any]]) -> list[tuple[int, dict[str, float]]]:
    return [(row["step"], {k: v for k, v in row.items() if k not in ("step", "timestamp")}) for row in rows]


def traces(project: str) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_traces(project, "qwen2.5-3b_function_rm", sort="oldest")


def test_trackio_has_every_row_under_its_exact_name(tmp_path: Path, project: str):
    from trackio.sqlite_storage import SQLiteStorage

    tracked(run_folder(tmp_path / "run"), config(project, "trainer.logger=[console,trackio]"), *ROWS)

    [(name, rows)] = stored(project)
    kept = SQLiteStorage.get_run_config(project, name) or {}
    assert (name, metrics(rows)) == ("qwen2.5-3b_function_rm", [(row.step, row.data) for row in ROWS])
    assert kept["trainer"]["logger"] == ["console", "trackio"]
    assert traces(project) == []


def test_a_resumed_run_goes_on_in_its_trackio_run_though_a_newer_one_has_its_name(tmp_path: Path, project: str):
    wanted = config(project, "trainer.logger=trackio")
    folder = run_folder(tmp_path / "run")
    tracked(folder, wanted, *ROWS[:2])
    tracked(folder, wanted, *ROWS, caught_up=2)
    assert [metrics(rows) for _, rows in stored(project)] == [[(row.step, row.data) for row in ROWS]]

    tracked(run_folder(tmp_path / "newer"), wanted, ROWS[0])
    tracked(folder, wanted, *ROWS, caught_up=3)

    assert sorted(len(rows) for _, rows in stored(project)) == [
        1,
        3,
        3,
    ]  # the newer run, the first, and the resumed one, whole


def test_each_traced_trajectory_is_a_trackio_trace_with_verls_tags(tmp_path: Path, project: str):
    folder = run_folder(tmp_path / "run")
    example = ExampleTrace(step=1, sample_index=7, rollout_n=3)
    asked = [Message(role="user", content="6*9?")]
    trajectory = example.trajectory(prompt_messages=asked, prompt_ids=[1, 2])
    write_trajectories(
        folder.path / "trajectories" / "step_1.parquet", [trajectory, example.trajectory(trace_id=None, id="untraced")]
    )
    validated = ExampleTrace(step=1, validate=True).trajectory()
    write_trajectories(folder.path / "trajectories" / "val_step_1.parquet", [validated])

    tracked(folder, config(project, TRACES, TEXT), ROWS[0], ROWS[1])

    trained, held_out = sorted(traces(project), key=lambda trace: trace["metadata"]["validate"])
    call = trajectory.turns[0].messages[0].model_dump(mode="json", exclude_none=True)
    result = {"role": "tool", "content": example.result, "tool_call_id": "call_0_0"}
    answer = {"role": "assistant", "content": example.answer}
    assert trained["messages"] == [{"role": "user", "content": "6*9?"}, call, result, answer]
    assert trained["metadata"] == {
        "experiment_name": "tiny",
        "step": 1,
        "sample_index": 7,
        "rollout_n": 3,
        "validate": False,
        "status": "success",
        "duration_ms": 0.0,
        "session_id": "tiny/1/7/3",
        "trace_id": trajectory.trace_id,
        "data_source": "tiny",
        "stop_reason": "answered",
        "num_turns": 4,
        "prompt_tokens": 2,
        "response_tokens": 0,
        "reward": example.reward,
        "reward_components": {},
        "incidents": [],
    }
    assert (trained["key"], trained["step"]) == ("rollout_trace/tool_agent", 1)
    assert held_out["metadata"]["validate"] is True
    assert [metrics(rows) for _, rows in stored(project)] == [[(1, {})]]  # no metrics, since it is no logger here


def test_a_resumed_run_neither_lacks_nor_repeats_a_trajectory(tmp_path: Path, project: str):
    folder, wanted = run_folder(tmp_path / "run"), config(project, TRACES, "trainer.logger=trackio")
    for step in (1, 2):
        dump = folder.path / "trajectories" / f"step_{step}.parquet"
        write_trajectories(dump, [ExampleTrace(step=step, rollout_n=n).trajectory() for n in range(2)])
    tracked(folder, wanted, *ROWS[:2])

    tracked(folder, wanted, *ROWS, caught_up=3)

    tags = [(trace["metadata"]["step"], trace["metadata"]["rollout_n"]) for trace in traces(project)]
    assert sorted(tags) == [(1, 0), (1, 1), (2, 0), (2, 1)]
    assert all(trace["messages"] == [] for trace in traces(project))  # token2text is off


def test_the_redaction_of_spans_holds_for_trackios_traces(
    tmp_path: Path, project: str, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "hides.py").write_text("def it(text: str) -> str:\n    return text.replace('6*9', '[x]')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = run_folder(tmp_path / "run")
    asked = [Message(role="user", content="what is 6*9?")]
    dump = folder.path / "trajectories" / "step_1.parquet"
    write_trajectories(dump, [ExampleTrace(step=1).trajectory(prompt_messages=asked)])

    tracked(folder, config(project, TRACES, TEXT), ROWS[1], redact="hides:it")

    [trace] = traces(project)
    assert trace["messages"][0]["content"] == "what is [x]?"
    assert trace["messages"][1]["tool_calls"][0]["function"]["arguments"] == '{"expression": "[x]"}'


def test_trackio_as_a_trace_backend_needs_its_package(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("trackway.trainer.tracking.opening.find_spec", lambda name: None)

    with pytest.raises(
        TrackwayError, match=r"^actor_rollout_ref.rollout.trace.backend: .* trackio .*'trackway\[trackio\]'"
    ):
        check_loggers(compose([TRACES]), None)
