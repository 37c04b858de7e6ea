"""The console's JSON: exact values on a small run, and folders that are empty, broken or of another kind."""

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path

import httpx
import pytest
from fastapi.testclient import TestClient
from pydantic import SecretStr
from tokenizers import Tokenizer

from tests.console.example_run import (
    MESSAGE,
    SPAN_ID,
    TRACE_ID,
    mlflow_span,
    rollout,
    write_evaluation,
    write_remax_step,
    write_run,
    write_step,
    write_values,
)
from trackway.console import app, over_steps, search, steps, trajectory_files
from trackway.console.app import create_app
from trackway.console.trajectory_files import File, ParquetReader
from trackway.deploy.bundled import TINY_MODEL
from trackway.serving import AuthSettings, ServiceSettings
from trackway.serving.auth import Token
from trackway.trainer.run_state.folder import Activity, Beat, Owner, RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories, write_trajectories
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.service import Wait
from trackway.wire.trainer import MetricsRow
from trackway.wire.trajectory import Incident, TeacherScores, Trajectory

HOSTILE = "<script>alert(1)</script>\x1b[31m\u202e"


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    return tmp_path / "outputs"


@lru_cache(maxsize=1)
def client_of(outputs: Path) -> TestClient:
    return TestClient(create_app(outputs))


def get(outputs: Path, path: str, **parameters: object) -> dict:
    reply = client_of(outputs).get(f"/api/{path}", params=parameters)  # pyright: ignore[reportArgumentType]
    assert reply.status_code == 200, reply.text
    return reply.json()


def refused(outputs: Path, path: str, **parameters: object) -> tuple[int, str, str]:
    reply = client_of(outputs).get(f"/api/{path}", params=parameters)  # pyright: ignore[reportArgumentType]
    error = reply.json()["error"]
    return reply.status_code, error["code"], error["message"]


def test_the_list_has_the_runs_of_the_folder_and_of_the_folders_in_it(outputs: Path) -> None:
    write_run(outputs / "demo", "inner")
    write_run(outputs, "tidy", message="done")

    page = get(outputs, "runs")

    assert (page["outputs"], page["total"]) == (str(outputs), 2)
    assert [run.pop("changed") > 0 for run in page["runs"]] == [True, True]
    assert [run["key"] for run in page["runs"]] == ["tidy", "demo/inner"]
    assert page["runs"][0] == {
        "key": "tidy",
        "name": "tidy",
        "state": "finished",
        "alive": None,
        "step": 2,
        "total_steps": 2,
        "restarts": 0,
        "policy": None,
        "message": "done",
        "reward": {"steps": [1, 2], "values": [0.25, 0.25]},
        "accuracy": {"steps": [0], "values": [0.25]},
        "failed": 0,
        "seconds": 4.0,
        "tokens": None,
        "gpu_seconds": None,
    }
    assert [run["key"] for run in get(outputs, "runs", offset=1, limit=1)["runs"]] == ["demo/inner"]


def test_the_folder_of_one_run_is_a_list_of_it(outputs: Path) -> None:
    write_run(outputs)

    assert [run["key"] for run in get(outputs / "tidy", "runs")["runs"]] == ["tidy"]
    assert get(outputs / "tidy", "run", run="tidy")["summary"]["step"] == 2


def test_a_run_has_its_newest_metrics_its_files_and_its_rollouts(outputs: Path) -> None:
    write_run(outputs)

    page = get(outputs, "run", run="tidy")

    assert page["metrics"] == {
        "actor/entropy": None,
        "critic/score/mean": 0.25,
        "timing_s/gen": 1.5,
        "timing_s/step": 2.0,
        "val-core/own/acc/mean@1": 0.25,
    }
    assert [(file["step"], file["validation"]) for file in page["files"]] == [(0, True), (1, False), (2, False)]
    assert page["rollouts"] == {"submitted": 8, "used": 8}
    assert page["mlflow"] == "http://127.0.0.1:5000/#/experiments/3/traces"
    assert page["weave"] == "https://wandb.ai/team/own/weave/traces"
    assert get(outputs, "metrics", run="tidy", name=["timing_s/gen", "actor/entropy", "none"])["series"] == {
        "timing_s/gen": {"steps": [1, 2], "values": [1.5, 1.5]},
        "actor/entropy": {"steps": [1, 2], "values": [None, None]},
        "none": {"steps": [], "values": []},
    }


def test_a_run_costs_the_seconds_and_the_tokens_of_its_steps_on_each_of_its_gpus(outputs: Path) -> None:
    folder = write_run(outputs)
    config = json.loads((folder.path / "config.json").read_text())
    config["trainer"] |= {"n_gpus_per_node": 4, "nnodes": 2}
    (folder.path / "config.json").write_text(json.dumps(config))
    folder.append_row(MetricsRow(step=3, data={"timing_s/step": 6.0, "perf/total_num_tokens": 1000.0}))

    [run] = get(outputs, "runs")["runs"]

    assert (run["seconds"], run["tokens"], run["gpu_seconds"]) == (10.0, 1000, 80.0)


def test_a_configuration_is_sent_as_its_file_has_it_and_empty_if_that_cannot_be_read(outputs: Path) -> None:
    file = write_run(outputs).path / "config.json"
    whole = get(outputs, "config", run="tidy")
    file.write_text('{"trainer": {"n_gpus_per_node": ')
    torn = get(outputs, "config", run="tidy")

    assert whole["values"]["trainer"]["experiment_name"] == "tidy"
    assert torn == {"values": {}} and get(outputs, "runs")["runs"][0]["gpu_seconds"] is None


def test_a_run_is_sent_again_only_once_one_of_its_files_changed(outputs: Path) -> None:
    folder = write_run(outputs)
    client = client_of(outputs)
    first = client.get("/api/run", params={"run": "tidy"})
    known = {"if-none-match": first.headers["etag"]}

    folder.write_beat(Beat(owner=Owner.of(os.getpid()), count=7))  # as every three seconds
    same = client.get("/api/run", params={"run": "tidy"}, headers=known)
    write_step(folder, 3)
    changed = client.get("/api/run", params={"run": "tidy"}, headers=known)

    assert (same.status_code, same.content) == (304, b"")
    assert changed.status_code == 200 and changed.json()["summary"]["reward"]["steps"] == [1, 2, 3]


def test_only_new_lines_of_the_metrics_are_read_and_all_of_a_file_that_was_rewritten(outputs: Path) -> None:
    folder = write_run(outputs)

    def steps() -> list[int]:
        page = get(outputs, "metrics", run="tidy", name="timing_s/step")
        return page["series"]["timing_s/step"]["steps"]

    assert steps() == [1, 2]
    text = folder.metrics_file.read_bytes()
    folder.metrics_file.write_bytes(text.replace(b'"step":1', b"        "))  # a reader of the whole file would miss it
    write_step(folder, 3)
    assert steps() == [1, 2, 3]

    with folder.metrics_file.open("ab") as file:
        file.write(b'{"step":4,"data":{"timing')
    assert steps() == [1, 2, 3]
    with folder.metrics_file.open("ab") as file:
        file.write(b'_s/step":2.0}}\n')
    assert steps() == [1, 2, 3, 4]

    folder.rewind(folder.rows()[1])  # as a run does that resumes after step 2
    assert steps() == [2]
    folder.rewind(None)
    for step in range(1, 7):
        write_step(folder, step)  # longer than what was read
    assert steps() == [1, 2, 3, 4, 5, 6]


def test_a_live_run_says_why_it_waits_and_a_dead_one_that_it_is_dead(outputs: Path) -> None:
    folder = write_run(outputs)
    state = folder.path / "state.json"
    state.write_text(state.read_text().replace('"finished"', '"running"'))
    wait = Wait(who="the learner", waits_for="rollouts of step 3", since=1000, progress="7 of 8")
    folder.write_activity(Activity(waits=[wait]))

    client = client_of(outputs)
    first = client.get("/api/run", params={"run": "tidy"})
    (folder.path / "worker.json").unlink()
    live, known = first.json(), {"if-none-match": first.headers["etag"]}
    dead = client.get("/api/run", params={"run": "tidy"}, headers=known).json()

    assert (live["summary"]["alive"], live["waits"][0]["waits_for"]) == (True, "rollouts of step 3")
    assert (dead["summary"]["alive"], dead["waits"]) == (False, [])


def test_a_step_has_its_rollouts_by_column_in_the_order_of_numbers(outputs: Path) -> None:
    write_run(outputs)

    page = get(outputs, "step", run="tidy", step=2)

    assert page == {
        "step": 2,
        "validation": False,
        "total": 4,
        "offset": 0,
        "sample_index": ["7", "7", "10", "10"],
        "rollout_n": [0, 1, 0, 1],
        "score": [0.0, 1.0, None, 0.0],
        "advantage": [None] * 4,
        "stop_reason": ["answered", "answered", "error", "answered"],
        "error": [None, None, "tool_timeout", None],
        "num_turns": [4, 4, 4, 4],
        "tokens": [5, 5, 5, 5],
        "seconds": [1.5, 2.5, 1.5, 2.5],
        "parts": {"model": [0.75] * 4, "tools": [0.25] * 4, "scorer": [0.125] * 4},
        "incidents": [0, 1, 0, 0],
        "traced": [False, True, False, False],
        "is_baseline": [False] * 4,
        "prompts": {"7": "How much is 7 x 6?", "10": "How much is 7 x 6?"},
    }
    part = get(outputs, "step", run="tidy", step=2, offset=2, limit=2)
    assert (part["total"], part["sample_index"], part["rollout_n"]) == (4, ["10", "10"], [0, 1])
    assert get(outputs, "step", run="tidy", step=0, validation=True)["sample_index"] == ["7"]


def test_the_pages_of_a_step_have_whole_groups_and_each_rollout_once(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_run(outputs)
    groups = [rollout("tidy", 3, sample, n) for sample in (1, 2, 3) for n in range(3)]
    write_trajectories(folder.path / "trajectories/step_3.parquet", groups)

    def page(offset: int, limit: int) -> tuple[int, list[str]]:
        reply = get(outputs, "step", run="tidy", step=3, offset=offset, limit=limit)
        return reply["offset"], [
            f"{sample}/{n}" for sample, n in zip(reply["sample_index"], reply["rollout_n"], strict=True)
        ]

    assert page(0, 4) == (0, ["1/0", "1/1", "1/2", "2/0", "2/1", "2/2"])
    assert page(4, 4) == (6, ["3/0", "3/1", "3/2"])
    assert page(8, 4) == (8, [])
    assert page(2, 2) == (2, ["1/2", "2/0"])  # groups of more than a page are cut
    monkeypatch.setattr(steps, "MOST_ROLLOUTS", 4)
    table = client_of(outputs).get("/api/export", params={"run": "tidy", "step": 3, "format": "csv"}).text
    assert [line.split(",")[2:4] for line in table.splitlines()[1:]] == [[sample, n] for sample in "123" for n in "012"]


def test_the_greedy_baselines_of_a_group_are_marked(outputs: Path) -> None:
    write_remax_step(write_run(outputs), 3)

    page = get(outputs, "step", run="tidy", step=3)
    prompt = get(outputs, "prompt", run="tidy", sample="10")
    group = get(outputs, "trajectory", run="tidy", step=3, sample="10", rollout=1)

    assert page["is_baseline"] == [False, False, True] * 2
    assert [found["is_baseline"] for found in prompt["rollouts"]] == [False] * 6 + [True]
    assert [(member["score"], member["is_baseline"]) for member in group["group"]] == [
        (None, False),
        (0.0, False),
        (1.0, True),
    ]


def test_an_index_may_be_text(outputs: Path) -> None:
    folder = write_run(outputs)
    rollouts = [rollout("tidy", 3, sample, 0) for sample in ("django-9", 12, "9")]
    write_trajectories(folder.path / "trajectories/step_3.parquet", rollouts)

    assert get(outputs, "step", run="tidy", step=3)["sample_index"] == ["9", "12", "django-9"]
    page = get(outputs, "trajectory", run="tidy", step=3, sample="12", rollout=0)
    assert (page["previous"]["sample"], page["next"]["sample"]) == ("9", "django-9")


def test_a_trajectory_has_its_turns_its_group_its_neighbours_and_its_trace(outputs: Path) -> None:
    write_run(outputs)

    page = get(outputs, "trajectory", run="tidy", step=1, sample="7", rollout=1)

    place = {"step": 1, "validation": False}
    assert page["previous"] == {**place, "sample": "7", "rollout": 0}
    assert page["next"] == {**place, "sample": "10", "rollout": 0}
    assert page["group"] == [
        {"rollout": 0, "score": 0.0, "advantage": None, "error": None, "is_baseline": False},
        {"rollout": 1, "score": 1.0, "advantage": None, "error": None, "is_baseline": False},
    ]
    assert page["turns"][0]["calls"][0]["seconds"] == 0.25
    assert page["turns"][1]["messages"][0]["content"] == "#### 42"
    assert (page["reward"], page["ground_truth"]) == ({"score": 1.0, "components": {"correct": 1.0}}, "42")
    assert (page["prompt_tokens"], page["response_tokens"], page["model_tokens"], page["rows"]) == (2, 5, 4, 1)
    assert page["trace"] == f"http://127.0.0.1:5000/#/experiments/3/traces?selectedEvaluationId=tr-{TRACE_ID}"
    assert page["weave"] == f"https://wandb.ai/team/own/r/call/{SPAN_ID}"
    assert (page["incidents"], page["error"], page["shortened"]) == (["retried"], None, False)
    assert page["incident_services"] == {"retried": ["tools"]}
    last = get(outputs, "trajectory", run="tidy", step=1, sample="10", rollout=1)
    assert (last["next"], last["trace"], last["weave"], last["previous"]["rollout"]) == (None, None, None, 0)


def test_a_long_text_loses_its_middle(outputs: Path) -> None:
    folder = write_run(outputs)
    text = "a" * 60_000 + "b" * 60_000
    write_trajectories(folder.path / "trajectories/step_3.parquet", [rollout("tidy", 3, 1, 0, text=text)])

    page = get(outputs, "trajectory", run="tidy", step=3, sample="1", rollout=0)

    content = page["prompt_messages"][0]["content"]
    assert content == f"{'a' * 50_000}\n… 20000 characters …\n{'b' * 50_000}" and page["shortened"]


def test_evaluations_of_the_same_rows_stand_row_by_row_the_hardest_first(outputs: Path) -> None:
    write_evaluation(outputs / "first", {1: [1.0, 0.0], 2: [0.0, None], 3: [1.0, 1.0]})
    write_evaluation(outputs / "second", {1: [1.0, 1.0], 2: [1.0, 0.0]})
    write_evaluation(outputs / "of-others", {1: [1.0]}, files=["other.jsonl"])
    write_run(outputs)

    page = get(outputs, "evaluations", run="first")

    assert [column["key"] for column in page["columns"]] == ["first", "second"]
    first, second = page["columns"]
    assert (first["difference"], second["difference"]["value"], second["difference"]["tasks"]) == (None, 0.5, 2)
    assert first["evaluation"]["summary"]["pass_at"]["1"]["value"] == 0.5
    listed = {run["key"]: run["accuracy"]["values"] for run in get(outputs, "runs")["runs"]}
    assert (listed["second"], listed["tidy"]) == ([0.75], [0.25])  # not best@2, whose name is before
    assert [task["sample"] for task in page["tasks"]] == ["2", "1", "3"]
    hard, middle, easy = (task["results"] for task in page["tasks"])
    assert hard[0] == {"score": 0.0, "passed": 0, "rollouts": 1, "failed": 1}
    assert middle == [
        {"score": 0.5, "passed": 1, "rollouts": 2, "failed": 0},
        {"score": 1.0, "passed": 2, "rollouts": 2, "failed": 0},
    ]
    assert (easy[1], page["tasks"][0]["prompt"], page["total"]) == (None, "row 2", 3)
    assert [task["sample"] for task in get(outputs, "evaluations", run="first", offset=1, limit=1)["tasks"]] == ["1"]
    assert get(outputs, "run", run="first")["evaluation"]["model"] == "m"
    assert get(outputs, "run", run="tidy")["evaluation"] is None
    status, _, message = refused(outputs, "evaluations", run="tidy")
    assert (status, "trackway evaluate tidy" in message) == (404, True)


def test_a_character_of_several_tokens_is_shown_with_its_last_one(outputs: Path) -> None:
    tokenizer = Tokenizer.from_file(str(TINY_MODEL / "tokenizer.json"))
    text = "שלום 😀 مرحبا"
    ids = tokenizer.encode(text).ids
    folder = write_run(outputs)
    config = folder.config().with_values({"actor_rollout_ref.model.path": str(TINY_MODEL)})
    folder.write_config(config)
    none = {"response_ids": ids, "response_mask": [1] * len(ids), "response_logprobs": [-0.5] * len(ids)}
    written = rollout("tidy", 3, 1, 0).model_copy(update={**none, "prompt_ids": [], "turns": [], "weight_versions": []})
    write_trajectories(folder.path / "trajectories/step_3.parquet", [written])

    address = {"run": "tidy", "step": 3, "sample": "1", "rollout": 0}
    whole = get(outputs, "tokens", **address)
    second = get(outputs, "tokens", **address, offset=1, limit=1)

    assert "".join(whole["pieces"]) == text and "\ufffd" not in text
    assert whole["pieces"][:2] == ["", "ש"]
    assert second["pieces"] == ["ש"]
    assert [token["piece"] for token in whole["ranked"]] == whole["pieces"][: len(whole["ranked"])]


def test_tokens_have_what_the_row_has_of_them(outputs: Path) -> None:
    write_run(outputs)

    page = get(outputs, "tokens", run="tidy", step=1, sample="7", rollout=0)

    assert page == {
        "row": 0,
        "rows": 1,
        "total": 7,
        "offset": 0,
        "prompt_tokens": 2,
        "ids": [1, 2, 3, 4, 5, 6, 7],
        "pieces": None,
        "mask": [0, 0, 1, 1, 0, 1, 1],
        "logprobs": [None, None, -0.5, -0.25, None, -2.0, -0.125],
        "versions": [None, None, 1, 1, None, 2, 2],
        "teacher": [],
        "learner": None,
        "ranked": [
            {"place": 5, "id": 6, "piece": None, "value": -2.0},
            {"place": 2, "id": 3, "piece": None, "value": -0.5},
            {"place": 3, "id": 4, "piece": None, "value": -0.25},
            {"place": 6, "id": 7, "piece": None, "value": -0.125},
        ],
        "unreadable": "",
    }
    part = get(outputs, "tokens", run="tidy", step=1, sample="7", rollout=0, offset=4, limit=2)
    assert (part["ids"], part["versions"]) == ([5, 6], [None, 2])
    assert refused(outputs, "tokens", run="tidy", step=1, sample="7", rollout=0, row=1)[:2] == (404, "not_found")


def test_tokens_have_what_the_learner_computed_of_them(outputs: Path) -> None:
    folder = write_run(outputs)
    write_values(folder, 2)
    place = {"run": "tidy", "step": 2}

    page = get(outputs, "tokens", **place, sample="7", rollout=1, offset=1, limit=5)

    assert page["learner"] == {
        "status": "used",
        "logprobs": [None, -0.75, -0.5, None, -3.5],
        "entropies": [None, 1.0, 0.5, None, 2.0],
        "advantages": [None, 0.5, 0.5, None, 0.5],
        "clipped": [False, False, True, False, False],
        "kept": [False, True, True, False, True],
    }
    statuses = [get(outputs, "tokens", **place, sample="10", rollout=n)["learner"] for n in (0, 1)]
    assert [learner["status"] for learner in statuses] == ["error", "stale"]
    assert statuses[1]["logprobs"] == statuses[1]["kept"] == []
    assert get(outputs, "tokens", run="tidy", step=0, validation=True, sample="7", rollout=0)["learner"] is None
    file = folder.path / "token_values/step_2.parquet"
    file.write_bytes(file.read_bytes()[:300])
    page = get(outputs, "tokens", **place, sample="7", rollout=1)
    assert (page["learner"], page["total"]) == (None, 7) and str(file) in page["unreadable"]


def test_tokens_have_the_logprobs_of_a_teacher_and_are_ranked_by_their_difference(outputs: Path) -> None:
    file = write_run(outputs).path / "trajectories/step_2.parquet"
    scores = TeacherScores(teacher="t", logprobs=[-1.0, -0.25, -0.5, -2.125], top_ids=[[1]] * 4, top_logprobs=[[0]] * 4)
    write_trajectories(
        file,
        [
            trajectory.model_copy(update={"teacher": scores}) if sum(trajectory.response_mask) == 4 else trajectory
            for trajectory in read_trajectories(file)
        ],
    )

    page = get(outputs, "tokens", run="tidy", step=2, sample="7", rollout=1, offset=1, limit=5, rank="teacher")

    assert page["teacher"] == [None, -1.0, -0.25, None, -0.5]
    assert [(token["place"], token["value"]) for token in page["ranked"]] == [(6, -2.0), (5, 1.5), (2, -0.5), (3, 0.0)]
    assert scores in [trajectory.teacher for trajectory in read_trajectories(file)]


@pytest.mark.parametrize(
    ("rank", "places", "first"),
    [
        ("logprob", [5, 2, 3, 6], -2.0),
        ("learner", [5, 2, 3, 6], -3.5),
        ("difference", [5, 2, 3, 6], -1.5),
        ("entropy", [5, 2, 3], 2.0),
        ("advantage", [2, 3, 5, 6], 0.5),
    ],
)
def test_tokens_of_the_whole_row_are_ranked_whatever_page_is_shown(
    outputs: Path, rank: str, places: list[int], first: float
) -> None:
    write_values(write_run(outputs), 2)

    page = get(outputs, "tokens", run="tidy", step=2, sample="7", rollout=1, offset=0, limit=2, rank=rank)

    assert ([token["place"] for token in page["ranked"]], page["ranked"][0]["value"]) == (places, first)


def test_a_place_of_the_response_opens_the_page_that_has_it(outputs: Path) -> None:
    write_run(outputs)

    page = get(outputs, "tokens", run="tidy", step=2, sample="7", rollout=1, limit=2, place=3)

    assert (page["offset"], page["ids"]) == (4, [5, 6])


def found(page: dict) -> list[tuple[int, bool, str, int]]:
    places = [hit["address"] for hit in page["hits"]]
    return [(place["step"], place["validation"], place["sample"], place["rollout"]) for place in places]


def test_search_finds_texts_tools_errors_and_rewards_the_newest_step_first(outputs: Path) -> None:
    write_run(outputs)
    every = {"run": "tidy"}

    assert found(get(outputs, "search", **every, text="#### 42")) == [(2, False, "7", 1), (1, False, "7", 1)]
    assert len(found(get(outputs, "search", **every, text='{"EXPRESSION": "7*6"}'))) == 9
    assert found(get(outputs, "search", **every, text="response_start")) == []  # the name of a field
    assert found(get(outputs, "search", **every, text='tool "calculator" took')) == [
        (2, False, "10", 0),
        (1, False, "10", 0),
    ]
    assert len(found(get(outputs, "search", **every, tool="calculator"))) == 9
    assert found(get(outputs, "search", **every, tool="calc")) == []
    assert found(get(outputs, "search", **every, error="tool_timeout", last_step=1)) == [(1, False, "10", 0)]
    assert found(get(outputs, "search", **every, least=0.5, first_step=2)) == [(2, False, "7", 1)]
    assert found(get(outputs, "search", **every, validation=True)) == [(0, True, "7", 0)]
    hit = get(outputs, "search", **every, text="tool_TIME", error="tool_timeout")
    assert hit["hits"] == []  # the code is no text of the conversation
    [hit] = get(outputs, "search", **every, text="#### 42", first_step=2)["hits"]
    assert (hit["score"], hit["stop_reason"], hit["tools"], hit["snippet"]) == (
        1.0,
        "answered",
        ["calculator"],
        "#### 42",
    )


def test_search_takes_a_regular_expression_over_each_text(outputs: Path) -> None:
    folder = write_run(outputs)
    every = {"run": "tidy", "regex": True, "first_step": 2}

    [hit] = get(outputs, "search", **every, text=r"^#+ 4\d$")["hits"]
    assert (hit["address"]["rollout"], hit["snippet"]) == (1, "#### 42")
    assert len(found(get(outputs, "search", **every, text=r'"EXPRESSION": "7.6"'))) == 4
    long = rollout("tidy", 3, 7, 0, text="x" * 5000)
    write_trajectories(folder.path / "trajectories/step_3.parquet", [long])
    [hit, *_] = get(outputs, "search", **every, text=".*")["hits"]
    assert (hit["match"], hit["snippet"]) == ("x" * 200, f"{'x' * 260}…")
    [hit] = get(outputs, "search", run="tidy", text="X" * 1000)["hits"]
    assert (hit["match"], hit["snippet"]) == ("x" * 200, f"{'x' * 260}…")
    assert found(get(outputs, "search", **every, text="(?-i)HOW MUCH")) == []
    assert found(get(outputs, "search", **every, text=r"took \d+ s$")) == [(2, False, "10", 0)]
    status, code, message = refused(outputs, "search", **every, text="4[")
    assert (status, code) == (422, "invalid_request") and "expected a regular expression (RE2), got '(?i)4['" in message


@pytest.mark.parametrize(
    ("regex", "count"),
    [
        ("abc", 3),
        (r"\d{4}-\d{2}-\d{2}", 10),
        ("[ab].{500}c", 502),
        ("([ab ]{0,30}){30}c", 931),
        ("(?:(?:a?b? ?){30}){30}", 8190),
        (r"[]a\]]{3,}x", 4),
        (r"\{500\}", 5),
    ],
)
def test_states_of_an_expression_are_counted_out(regex: str, count: int) -> None:
    assert search.states(regex) == count


def test_an_expression_of_many_states_is_refused(outputs: Path) -> None:
    write_run(outputs)
    status, code, message = refused(outputs, "search", run="tidy", text="(a?b?){200}c", regex=True)
    assert (status, code) == (422, "invalid_request")
    assert message.startswith("expected an expression of at most 500 characters") and "got 1001" in message


def test_a_search_that_takes_long_goes_on_within_a_file(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(outputs)
    query = {"run": "tidy", "text": "#### [0-9]+", "regex": True}
    whole = get(outputs, "search", **query)["hits"]
    monkeypatch.setattr(search, "_MOST_STEPS", 1)  # a row a query
    monkeypatch.setattr(search, "BUDGET_S", 0.0)
    hits, cursor, pages = [], None, 0
    while pages == 0 or cursor:
        page = get(outputs, "search", **query, **({"cursor": cursor} if cursor else {}))
        hits, cursor, pages = hits + page["hits"], page["cursor"], pages + 1
    assert (hits, pages) == (whole, 9)


def test_a_search_reads_files_of_long_texts_in_parts(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_run(outputs)
    queries: list[dict[str, object]] = [
        {"text": "#### [0-9]+", "regex": True},
        {"tool": "calculator"},
        {"error": "tool_timeout"},
        {"tool_right": True, "most": 0},
    ]
    whole = [get(outputs, "search", run="tidy", **query)["hits"] for query in queries]

    monkeypatch.setattr(search, "_MOST_TEXT", 1)
    monkeypatch.setattr(search, "_MOST_JSON", 1)
    assert [get(outputs, "search", run="tidy", **query)["hits"] for query in queries] == whole
    assert [len(hits) for hits in whole] == [9, 9, 2, 2]
    monkeypatch.undo()

    monkeypatch.setattr(trajectory_files, "MEMORY", "192MB")
    client_of.cache_clear()
    long = [rollout("tidy", 3, 7, 0, text="long") for _ in range(1000)]
    for number, made in enumerate(long):
        made.turns[0].messages[0].content = f"{number} " + "so we add " * 2000
    write_trajectories(folder.path / "trajectories/step_3.parquet", long)
    page = get(outputs, "search", run="tidy", text=r"no \w+ such", regex=True)
    assert (page["hits"], page["unreadable"]) == ([], [])


def test_search_finds_an_answer_that_is_wrong_though_the_tool_was_right(outputs: Path) -> None:
    folder = write_run(outputs)
    wrong = {"run": "tidy", "tool_right": True, "most": 0, "first_step": 2}
    # The calculator says 42, which rollout 1 of sample 7 answers. No rollout of sample 10 is right.
    assert found(get(outputs, "search", **wrong)) == [(2, False, "7", 0)]

    paid, failed = rollout("tidy", 3, 10, 1), rollout("tidy", 3, 10, 0)
    paid.turns[0].calls[0].reward = failed.turns[0].calls[0].reward = 1.0
    write_trajectories(folder.path / "trajectories/step_3.parquet", [paid, failed])

    assert found(get(outputs, "search", **wrong)) == [(3, False, "10", 1), (2, False, "7", 0)]


def test_a_tool_and_an_error_are_those_of_one_call(outputs: Path) -> None:
    folder = write_run(outputs)
    other = rollout("tidy", 3, 10, 0)
    other.turns[0].calls.append(other.turns[0].calls[0].model_copy(update={"tool": "search", "error": None}))
    write_trajectories(folder.path / "trajectories/step_3.parquet", [other])

    assert found(get(outputs, "search", run="tidy", tool="search", error="tool_timeout")) == []
    assert len(found(get(outputs, "search", run="tidy", tool="calculator", error="tool_timeout"))) == 3


def test_search_goes_on_where_its_last_page_ended(outputs: Path) -> None:
    write_run(outputs)
    places, cursor = [], None
    while True:
        page = get(outputs, "search", run="tidy", tool="calculator", limit=2, **({"cursor": cursor} if cursor else {}))
        places += found(page)
        cursor = page["cursor"]
        if cursor is None:
            break

    assert places == found(get(outputs, "search", run="tidy", tool="calculator"))
    assert len(places) == len(set(places)) == 9
    assert refused(outputs, "search", run="tidy", cursor="x")[:2] == (422, "invalid_request")


def test_search_finds_a_rare_text_in_an_old_step_behind_a_torn_file(outputs: Path) -> None:
    folder = write_run(outputs, steps=7)
    rare = rollout("tidy", 1, 3, 0, text='say "Ärger" \\ once')
    write_trajectories(folder.path / "trajectories/step_1.parquet", [rollout("tidy", 1, 2, 0), rare])
    file = folder.path / "trajectories/step_3.parquet"
    file.write_bytes(file.read_bytes()[:2000])

    page = get(outputs, "search", run="tidy", text='"ärger" \\')

    assert (found(page), page["files"], page["cursor"]) == ([(1, False, "3", 0)], 8, None)
    assert len(page["unreadable"]) == 1 and str(file) in page["unreadable"][0]


def test_a_prompt_has_its_rollouts_in_all_steps(outputs: Path) -> None:
    write_run(outputs)

    page = get(outputs, "prompt", run="tidy", sample="7")

    assert (page["prompt"], page["unreadable"]) == ("How much is 7 x 6?", [])
    places = [(found["step"], found["rollout"], found["score"], found["answer"]) for found in page["rollouts"]]
    assert places == [(1, 0, 0.0, "#### 13"), (1, 1, 1.0, "#### 42"), (2, 0, 0.0, "#### 13"), (2, 1, 1.0, "#### 42")]
    validation = get(outputs, "prompt", run="tidy", sample="7", validation=True)
    assert [found["step"] for found in validation["rollouts"]] == [0]
    assert get(outputs, "prompt", run="tidy", sample="8")["rollouts"] == []


def test_failures_are_grouped_by_cause_and_a_torn_file_is_named(outputs: Path) -> None:
    folder = write_run(outputs, steps=3)
    file = folder.path / "trajectories/step_2.parquet"
    file.write_bytes(file.read_bytes()[:2000])
    rollouts = [rollout("tidy", 3, 10, 0), rollout("tidy", 3, 10, 0)]
    assert rollouts[0].error is not None
    rollouts[0].error.message = MESSAGE.replace("30", "31.5")
    write_trajectories(folder.path / "trajectories/step_3.parquet", rollouts)

    page = get(outputs, "failures", run="tidy")

    place = {"step": 3, "validation": False, "sample": "10", "rollout": 0}
    steps = {"steps": [1, 3], "values": [1.0, 2.0]}
    timeout = {"code": "tool_timeout", "count": 3, "rollouts": 2, "steps": steps, "validation": 0, "example": place}
    message = page["failures"][0].pop("message")
    assert page["failures"][0].pop("pattern") == MESSAGE.replace("30", "N")
    assert message in (MESSAGE, MESSAGE.replace("30", "31.5"))
    assert page["failures"] == [
        {"kind": "trajectory", "tool": None, "infrastructure": False, "service": "tools", "called": "", **timeout},
        {
            "kind": "call",
            "tool": "calculator",
            "message": "",
            "pattern": "",
            "infrastructure": False,
            "service": "tools",
            "called": "",
            **timeout,
        },
        {
            "kind": "incident",
            "code": "retried",
            "tool": None,
            "message": "",
            "pattern": "",
            "infrastructure": True,
            "service": "tools",
            "called": "tools",
            "count": 1,
            "rollouts": 1,
            "steps": {"steps": [1], "values": [1.0]},
            "validation": 0,
            "example": {"step": 1, "validation": False, "sample": "7", "rollout": 1},
        },
    ]
    assert len(page["unreadable"]) == 1 and str(file) in page["unreadable"][0]
    assert len(get(outputs, "prompt", run="tidy", sample="10")["unreadable"]) == 1


def test_incidents_are_infrastructure_by_their_name_and_no_failure_is_listed_twice(outputs: Path) -> None:
    folder = write_run(outputs, steps=1)
    every = rollout("tidy", 1, 1, 0)
    every.incidents = list(Incident)
    told = rollout("tidy", 1, 2, 0)  # the model saw both errors
    told.turns[0].calls[0].error = ErrorCode.INVALID_REQUEST
    told.turns[0].calls.append(told.turns[0].calls[0].model_copy(update={"error": ErrorCode.TOOL_TIMEOUT}))
    told.incidents = [Incident.TOOL_FAILED, Incident.TOOL_TIMEOUT]
    ended = rollout("tidy", 1, 3, 0)
    ended.turns[0].calls[0].error = ErrorCode.INSTANCE_LOST
    ended.incidents = [Incident.INSTANCE_LOST]
    ended.error = ErrorBody(code=ErrorCode.INSTANCE_LOST, message="gone", retryable=False)
    write_trajectories(folder.path / "trajectories/step_1.parquet", [every, told, ended])

    found = get(outputs, "failures", run="tidy")["failures"]

    assert sorted(
        (
            failure["kind"],
            failure["code"],
            failure["tool"],
            failure["infrastructure"],
            failure["service"],
            failure["count"],
        )
        for failure in found
    ) == [
        ("call", "invalid_request", "calculator", False, "tools", 1),
        ("call", "tool_timeout", "calculator", False, "tools", 1),
        ("incident", "generation_cut", None, False, "rollout", 1),
        ("incident", "instance_lost", None, True, "tools", 1),
        ("incident", "prompt_cut", None, False, "agent", 1),
        ("incident", "replica_lost", None, True, "", 1),
        ("incident", "retried", None, True, "", 1),
        ("incident", "tool_failed", None, False, "tools", 1),
        ("incident", "tool_timeout", None, False, "tools", 1),
        ("incident", "weights_behind", None, True, "rollout", 1),
        ("trajectory", "instance_lost", "calculator", True, "tools", 1),
    ]


def test_incidents_of_calls_are_grouped_by_the_called_service_which_search_takes(outputs: Path) -> None:
    folder = write_run(outputs, steps=0)
    made = [rollout("tidy", 1, 1, n) for n in range(3)]
    for one, services in zip(made, (["tools"], ["rollout", "tools"], []), strict=True):
        one.incidents, one.turns[0].calls = [Incident.RETRIED], []
        one.incident_services = {Incident.RETRIED: services} if services else {}
    write_trajectories(folder.path / "trajectories/step_1.parquet", made)

    failures = get(outputs, "failures", run="tidy")["failures"]
    assert [(failure["called"], failure["service"], failure["count"]) for failure in failures] == [
        ("tools", "tools", 2),
        ("", "", 1),
        ("rollout", "rollout", 1),
    ]
    page = get(outputs, "search", run="tidy", incident="retried", service="tools")
    assert (found(page), page["unreadable"]) == ([(1, False, "1", 0), (1, False, "1", 1)], [])


def test_search_finds_the_rollouts_of_each_group_of_failures(outputs: Path) -> None:
    folder = write_run(outputs)
    other, twice = rollout("tidy", 3, 10, 0), rollout("tidy", 3, 10, 1)
    assert other.error is not None
    other.error.message = "the queue is full for 2.5 s"
    failed = {"error": ErrorCode.TOOL_FAILED, "message": "KeyError: 'k' (/d/tools.py:7)"}
    twice.turns[0].calls = [twice.turns[0].calls[0].model_copy(update=failed)] * 2
    alone = rollout("tidy", 3, 11, 0)
    alone.error, failed["message"] = None, "ValueError: 12 of 30"
    alone.turns[0].calls = [alone.turns[0].calls[0].model_copy(update=failed)]
    twice.incidents = [Incident.TOOL_FAILED, Incident.REPLICA_LOST]
    write_trajectories(folder.path / "trajectories/step_3.parquet", [other, twice, alone])

    asked = {}
    for group in get(outputs, "failures", run="tidy")["failures"]:
        error = {"error": group["code"]}
        query = {
            "trajectory": {**error, "message": group["pattern"]},
            "call": {**error, "tool": group["tool"], "message": group["pattern"]},
            "incident": {"incident": group["code"]},
        }[group["kind"]]
        asked[group["kind"], group["code"], group["pattern"]] = (group["count"], group["rollouts"])
        assert len(found(get(outputs, "search", run="tidy", **query))) == group["rollouts"], group

    assert asked == {
        ("trajectory", "tool_timeout", MESSAGE.replace("30", "N")): (2, 2),
        ("trajectory", "tool_timeout", "the queue is full for N s"): (1, 1),
        ("call", "tool_timeout", ""): (3, 3),
        ("call", "tool_failed", "KeyError: 'k' (/d/tools.py:N)"): (2, 1),
        ("call", "tool_failed", "ValueError: N of N"): (1, 1),
        ("incident", "retried", ""): (2, 2),
        ("incident", "replica_lost", ""): (1, 1),
    }


def test_what_goes_over_all_steps_answers_in_parts_the_newest_first(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_steps, "BUDGET_S", 0.0)
    monkeypatch.setattr(over_steps, "TOGETHER", 1)
    folder = write_run(outputs, steps=3)

    def prompt() -> tuple[int, int, list[int]]:
        page = get(outputs, "prompt", run="tidy", sample="7")
        return page["files"], page["files_left"], [found["step"] for found in page["rollouts"]]

    assert [prompt() for _ in range(4)] == [
        (3, 2, [3, 3]),
        (3, 1, [2, 2, 3, 3]),
        (3, 0, [1, 1, 2, 2, 3, 3]),
        (3, 0, [1, 1, 2, 2, 3, 3]),
    ]
    counted = [get(outputs, "failures", run="tidy") for _ in range(4)]
    assert [page["files_left"] for page in counted] == [3, 2, 1, 0]
    assert counted[0]["failures"][0]["steps"]["steps"] == [3]
    assert counted[3]["failures"][0]["steps"]["steps"] == [1, 2, 3]
    write_trajectories(folder.path / "trajectories/step_2.parquet", [rollout("tidy", 2, 7, 0)])
    assert prompt() == (3, 0, [1, 1, 2, 3, 3])


def test_the_first_answer_reads_few_files_and_later_ones_more_at_once(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_steps, "FIRST_TOGETHER", 2)
    write_run(outputs, steps=9)  # and a validation
    read: list[int] = []
    across = ParquetReader.across

    def counted(self: ParquetReader, sql: str, files: Sequence[File], **values: object):
        read.append(len(files))
        return across(self, sql, files, **values)

    monkeypatch.setattr(ParquetReader, "across", counted)
    monkeypatch.setattr(over_steps, "BUDGET_S", 0.0)
    assert get(outputs, "failures", run="tidy")["files_left"] == 8
    monkeypatch.setattr(over_steps, "BUDGET_S", 60.0)
    assert get(outputs, "failures", run="tidy")["files_left"] == 0
    assert read[::3] == [2, 2, 4, 2]  # three queries for each


def test_a_step_that_is_written_again_with_the_same_size_is_read_again(outputs: Path) -> None:
    folder = write_run(outputs)
    file = folder.path / "trajectories/step_2.parquet"

    def size(answer: str) -> int:
        again = rollout("tidy", 2, 7, 0)
        again.turns[1].messages[0].content = answer
        write_trajectories(file, [again])
        return file.stat().st_size

    by_size = defaultdict[int, list[str]](list)
    for number in range(10, 30):
        by_size[size(f"#### {number}")].append(f"#### {number}")
    for answer in max(by_size.values(), key=len)[:2]:
        size(answer)
        page = get(outputs, "prompt", run="tidy", sample="7")
        assert [found["answer"] for found in page["rollouts"]] == ["#### 13", "#### 42", answer]


def test_a_prompt_with_enough_rollouts_reads_no_older_file(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(over_steps, "MOST_ROLLOUTS", 3)
    monkeypatch.setattr(over_steps, "TOGETHER", 1)
    folder = write_run(outputs, steps=3)
    (folder.path / "trajectories/step_1.parquet").write_bytes(b"never read")

    page = get(outputs, "prompt", run="tidy", sample="7")

    assert [(found["step"], found["rollout"]) for found in page["rollouts"]] == [(2, 1), (3, 0), (3, 1)]
    assert (page["files_left"], page["unreadable"], page["truncated"]) == (0, [], True)
    monkeypatch.setattr(over_steps, "MOST_ROLLOUTS", 4)
    assert not get(outputs, "prompt", run="tidy", sample="7", validation=True)["truncated"]


def test_a_step_can_be_saved_as_numbers_and_as_whole_trajectories(outputs: Path) -> None:
    folder = write_run(outputs)
    client = client_of(outputs)
    step = {"run": "tidy", "step": 2}

    table = client.get("/api/export", params={**step, "format": "csv"}).text.splitlines()
    lines = client.get("/api/export", params={**step, "format": "jsonl"}).text.splitlines()

    assert table[0] == (
        "step,validation,sample_index,rollout_n,score,stop_reason,error,num_turns,tokens,seconds,incidents,traced,"
        "is_baseline"
    )
    assert table[2:4] == [
        "2,False,7,1,1.0,answered,,4,5,2.5,1,True,False",
        "2,False,10,0,,error,tool_timeout,4,5,1.5,0,False,False",
    ]
    written = read_trajectories(folder.path / "trajectories/step_2.parquet")
    assert [Trajectory.model_validate_json(line) for line in lines] == written
    [line] = client.get(
        "/api/export", params={**step, "format": "jsonl", "sample": "7", "rollout": 1}
    ).text.splitlines()
    assert Trajectory.model_validate_json(line) == written[1]
    assert refused(outputs, "export", run="tidy", step=9, format="csv")[:2] == (404, "not_found")


def test_the_spans_of_a_trace_come_from_the_mlflow_server_of_the_run(
    outputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(outputs)
    asked: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        frameworks = {
            "openinference.span.kind": "LLM",
            "llm.model_name": "gpt",
            "llm.token_count.prompt": "30",
            "llm.token_count.completion": "8",
        }
        spans = [
            mlflow_span(2, 1, 1.5, 2.0, "failed"),
            mlflow_span(1, None, 1.0, 3.0),
            mlflow_span(3, 1, 2.0, 2.5, **frameworks),
        ]
        return httpx.Response(200, json={"traces": [{"spans": spans}]})

    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "of-another-server")
    monkeypatch.setattr(
        "trackway.console.trajectory.mlflow_http",
        lambda uri, timeout: httpx.Client(transport=httpx.MockTransport(answer)),
    )

    page = get(outputs, "spans", run="tidy", trace=TRACE_ID)

    tools = {"service": "tools", "kind": "operation", "about": ""}
    assert page == {
        "spans": [
            tools | {"name": "span 1", "depth": 0, "start": 0.0, "seconds": 2.0, "error": ""},
            tools | {"name": "span 2", "depth": 1, "start": 0.5, "seconds": 0.5, "error": "failed"},
            {
                "name": "span 3",
                "service": "",
                "kind": "chat",
                "about": "gpt, 30 → 8 tokens",
                "depth": 1,
                "start": 1.0,
                "seconds": 0.5,
                "error": "",
            },
        ],
        "total": 3,
    }
    url = f"http://127.0.0.1:5000/api/3.0/mlflow/traces/batchGet?trace_ids=tr-{TRACE_ID}"
    assert [str(request.url) for request in asked] == [url] and "authorization" not in asked[0].headers
    assert refused(outputs, "spans", run="tidy", trace="../x")[:2] == (422, "invalid_request")


def test_a_folder_without_runs_is_an_empty_list(outputs: Path) -> None:
    assert get(outputs, "runs") == {"outputs": str(outputs), "total": 0, "runs": []}
    (outputs / "photos").mkdir(parents=True)
    (outputs / "photos" / "a.parquet").write_bytes(b"not ours")
    (outputs / "notes.txt").write_text("x")
    assert get(outputs, "runs")["total"] == 0


@pytest.mark.parametrize("key", ["../secret", "/etc", "", "tidy/trajectories", "tidy/../../x"])
def test_a_key_names_a_run_of_the_folder_and_no_path(outputs: Path, key: str) -> None:
    write_run(outputs)
    write_run(outputs.parent, "secret")

    assert refused(outputs, "run", run=key) == (
        404,
        "not_found",
        f"expected a run of {outputs} (tidy), got {key!r}; open the list of runs",
    )


def test_a_broken_state_is_shown_with_its_reason_and_the_steps_can_be_read(outputs: Path) -> None:
    folder = write_run(outputs)
    (folder.path / "state.json").write_text('{"run": "tidy", "step": 2, ')
    with folder.metrics_file.open("a") as file:
        file.write("not json\n")

    page = get(outputs, "run", run="tidy")

    assert page["summary"]["state"] == "unreadable" and "cannot be read" in page["summary"]["message"]
    assert page["summary"]["reward"]["steps"] == [1, 2] and len(page["files"]) == 3
    assert get(outputs, "step", run="tidy", step=2)["total"] == 4


def test_a_torn_file_is_named_and_the_others_are_searched(outputs: Path) -> None:
    folder = write_run(outputs)
    file = folder.path / "trajectories/step_2.parquet"
    file.write_bytes(file.read_bytes()[:2000])

    status, code, message = refused(outputs, "step", run="tidy", step=2)
    assert (status, code) == (409, "conflict")
    assert message.startswith(f"expected trajectories in {file}, got a file that cannot be read (")
    page = get(outputs, "search", run="tidy", text="#### 42")
    assert found(page) == [(1, False, "7", 1)] and len(page["unreadable"]) == 1


def test_a_file_that_goes_while_the_folder_is_read_is_left_out(outputs: Path) -> None:
    folder = write_run(outputs)
    write_values(folder, 2)
    for kind in ("trajectories", "token_values"):  # what is listed, and is gone when it is looked at
        (folder.path / kind / "step_3.parquet").symlink_to(outputs / "gone")

    assert [file["step"] for file in get(outputs, "run", run="tidy")["files"]] == [0, 1, 2]
    assert refused(outputs, "step", run="tidy", step=3)[:2] == (404, "not_found")
    (folder.path / "trajectories/step_3.parquet").unlink()
    write_step(folder, 3)
    assert get(outputs, "tokens", run="tidy", step=3, sample="7", rollout=0)["learner"] is None


def test_the_routes_are_listed_where_refusals_say(outputs: Path) -> None:
    write_run(outputs)
    client = client_of(outputs)

    assert client.get("/api/nothing").json()["error"]["message"].endswith("the routes are listed at /docs")
    assert client.get("/api/step?run=tidy").json()["error"]["message"] == (
        "the request does not fit the schema at /docs: query.step: Field required"
    )
    assert "openapi.json" in client.get("/docs").text
    assert "/api/step" in client.get("/openapi.json").json()["paths"]


def test_what_a_run_lacks_is_refused_with_what_it_has(outputs: Path) -> None:
    write_run(outputs)

    assert refused(outputs, "step", run="tidy", step=9) == (
        404,
        "not_found",
        "expected a step of run tidy (1 to 2), got 9; choose another step",
    )
    assert refused(outputs, "trajectory", run="tidy", step=1, sample="7", rollout=9) == (
        404,
        "not_found",
        "expected a rollout of step 1, got sample '7', rollout 9; open the step to choose one",
    )


def test_hostile_text_arrives_as_json_and_never_as_a_page(outputs: Path) -> None:
    folder = write_run(outputs, message=HOSTILE)
    write_trajectories(folder.path / "trajectories/step_3.parquet", [rollout("tidy", 3, 1, 0, text=HOSTILE)])
    client = client_of(outputs)

    reply = client.get("/api/trajectory", params={"run": "tidy", "step": 3, "sample": "1", "rollout": 0})

    assert reply.headers["content-type"] == "application/json"
    assert reply.json()["prompt_messages"][0]["content"] == HOSTILE
    assert json.loads(client.get("/api/runs").text)["runs"][0]["message"] == HOSTILE


def test_the_page_runs_its_own_scripts_alone_and_only_this_machine_reads_data(outputs: Path) -> None:
    write_run(outputs)
    app = create_app(outputs)
    page = TestClient(app).get("/")
    elsewhere = TestClient(app, client=("10.0.0.7", 1))

    assert page.headers["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self';"
    )
    assert page.headers["x-content-type-options"] == "nosniff"
    assert TestClient(app).get("/page/app.js").headers["content-type"].startswith("text/javascript")
    assert elsewhere.get("/").status_code == 200
    assert elsewhere.get("/api/runs").status_code == 401
    assert TestClient(app, headers={"origin": "http://evil.example"}).get("/api/runs").status_code == 401
    assert TestClient(app).post("/api/runs").status_code == 405


def test_no_script_of_the_page_makes_markup_of_a_text() -> None:
    markup = re.compile(r"(inner|outer)HTML|insertAdjacentHTML|createContextualFragment|DOMParser|document\.write")
    scripts = [*app.PAGE.rglob("*.js")]

    assert len(scripts) > 10 and [path.name for path in scripts if markup.search(path.read_text())] == []


def test_with_tokens_the_page_is_open_and_its_data_needs_one(outputs: Path) -> None:
    write_run(outputs)
    auth = AuthSettings(tokens={"people": Token(secret=SecretStr("a-secret-of-people"))})
    client = TestClient(create_app(outputs, ServiceSettings(auth=auth)))

    assert client.get("/").status_code == 200
    assert client.get("/api/runs").status_code == 401
    known = {"authorization": "Bearer a-secret-of-people"}
    assert client.get("/api/runs", headers=known).json()["total"] == 1


def test_a_query_that_needs_more_memory_fails_and_writes_nothing(
    outputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trajectory_files, "MEMORY", "30MB")
    monkeypatch.chdir(tmp_path)
    [file, *_] = trajectory_files.trajectory_files(write_run(outputs))
    large = "SELECT count(*) FROM (SELECT DISTINCT md5(i::VARCHAR) FROM range(2000000) t(i), read_parquet($file))"

    with pytest.raises(TrackwayError, match="to be read with 30MB of memory, got more; ask for less of it") as caught:
        ParquetReader().query(large, file)

    assert caught.value.code is ErrorCode.OVERLOADED
    assert list(tmp_path.iterdir()) == [outputs]


def test_the_console_writes_nothing_into_a_run(outputs: Path) -> None:
    folder = write_run(outputs)
    before = {path: path.stat().st_mtime_ns for path in sorted(folder.path.rglob("*"))}

    get(outputs, "runs")
    get(outputs, "run", run="tidy")
    get(outputs, "trajectory", run="tidy", step=1, sample="7", rollout=1)
    get(outputs, "search", run="tidy", text="42")

    assert {path: path.stat().st_mtime_ns for path in sorted(folder.path.rglob("*"))} == before
    assert RunFolder(folder.path).info().state == "finished"


def test_search_finds_the_trajectories_whose_traces_have_a_span(outputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(outputs)
    asked: list[dict[str, object]] = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content))
        if len(asked) == 1:
            return httpx.Response(200, json={"traces": [{"trace_id": f"tr-{'0' * 32}"}], "next_page_token": "more"})
        return httpx.Response(200, json={"traces": [{"trace_id": f"tr-{TRACE_ID}"}]} if len(asked) == 2 else {})

    monkeypatch.setattr(
        "trackway.console.trajectory.mlflow_http",
        lambda uri, timeout: httpx.Client(transport=httpx.MockTransport(answer)),
    )
    monkeypatch.setattr(search, "BUDGET_S", 60.0)
    every = {"run": "tidy", "limit": 50}

    assert found(get(outputs, "search", **every, span="execute_tool look*")) == [(2, False, "7", 1), (1, False, "7", 1)]
    assert found(get(outputs, "search", **every, span="none")) == []
    assert [body["filter"] for body in asked] == [*["span.name LIKE 'execute_tool look%'"] * 2, "span.name = 'none'"]
    assert [body.get("page_token") for body in asked] == [None, "more", None]
    quoted = refused(outputs, "search", run="tidy", span="'\"")
    assert quoted[:2] == (422, "invalid_request") and "both kinds of quotes" in quoted[2]

    monkeypatch.setattr("trackway.console.trajectory.MOST_TRACES", 1)
    monkeypatch.setattr(app, "MOST_TRACES", 1)
    asked.clear()
    [told] = get(outputs, "search", **every, span="turn *")["unreadable"]
    assert told == "searched the newest 1 traces with such a span, not the others"
    RunFolder(outputs / "tidy").update(mlflow_uri="sqlite:///a.db")
    assert refused(outputs, "search", run="tidy", span="turn")[:2] == (404, "not_found")
