import json
import re
from pathlib import Path

import datasets
import pytest

from trackway.trainer.run_state.trajectories import write_trajectories
from trackway.trainer.run_state.trajectory_export import (
    COLUMNS,
    Source,
    atif_files,
    dumped_files,
    export_trajectories,
)
from trackway.wire.chat import FunctionSchema, Message, ToolSchema
from trackway.wire.errors import TrackwayError
from trackway.wire.trajectory import Tags, Turn

TOOLS = [ToolSchema(function=FunctionSchema(name=name)) for name in ("subtract", "add")]
MESSAGES = [{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "2"}]


@pytest.fixture
def run(folder, rollout):
    """A run of steps 2 and 10 with a row each, of which rollout 1 scored 1.0, and a validation."""
    said = Message(role="assistant", content="2")
    turn = Turn(index=0, messages=[said], response_start=0, response_end=6, finish_reason="stop")
    texts = {"prompt_messages": [Message(role="user", content="1 + 1?")], "turns": [turn], "offered_tools": ["add"]}
    row = {
        "prompt_ids": [1],
        "response_ids": [2],
        "response_mask": [1],
        "response_logprobs": [-0.5],
    }

    def write(name, step, validation=False):
        members = []
        for number in (0, 1):
            tags = Tags(experiment_name="e", step=step, sample_index=7, rollout_n=number, validate=validation)
            further = {"further_rows": [row]} if number else {}
            members.append(rollout(7, number, float(number), **texts, **further, tags=tags, id=f"{name}/{number}"))
        write_trajectories(folder.path / "trajectories" / f"{name}.parquet", members)

    write("step_2", 2)
    write("step_10", 10)
    write("val_step_0", 0, validation=True)
    return folder


def test_chat_lines_have_messages_tools_reward_and_columns(run, tmp_path):
    target, source = tmp_path / "new" / "sft.jsonl", Source(dumped_files(run, None, False), tools=TOOLS)
    seen = []

    exported = export_trajectories(
        source, "chat", target, "score > 0.5", lambda done, total: seen.append((done, total))
    )

    lines = [json.loads(line) for line in target.read_text().splitlines()]
    assert [line["id"] for line in lines] == ["step_2/1", "step_10/1"]
    assert lines[0] == {
        "messages": MESSAGES,
        "tools": [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}],
        "reward": 1.0,
        "id": "step_2/1",
        "step": 2,
        "validation": False,
        "sample_index": "7",
        "rollout_n": 1,
        "failed": False,
        "error": None,
        "stop_reason": "answered",
        "agent_name": "a",
        "data_source": "d",
        "ground_truth": None,
        "num_turns": 4,
        "tokens": 7,
        "seconds": 0.0,
        "incidents": 0,
        "traced": False,
        "is_baseline": False,
    }
    assert exported == ("chat", str(target), 2, 2, 2)
    assert seen == [(0, 2), (1, 2), (2, 2)]


def test_datasets_loads_each_split_with_a_line_for_each_row_of_tokens(run, tmp_path):
    files = [*dumped_files(run, 10, False), *dumped_files(run, None, True)]

    export_trajectories(Source(files), "datasets", tmp_path / "set")

    loaded = datasets.load_dataset(str(tmp_path / "set"), cache_dir=str(tmp_path / "cache"))
    assert {split: loaded[split]["id"][:] for split in loaded} == {
        "train": ["step_10/0", "step_10/1", "step_10/1"],
        "validation": ["val_step_0/0", "val_step_0/1", "val_step_0/1"],
    }
    first, _, further = loaded["train"].to_list()
    assert [(said["role"], said["content"]) for said in first["messages"]] == [("user", "1 + 1?"), ("assistant", "2")]
    assert (first["score"], first["prompt_ids"], first["response_ids"]) == (0.0, [10, 11, 12], [20, 21, 30, 31, 22, 23])
    assert first["response_mask"] == [1, 1, 0, 0, 1, 1]
    assert first["response_logprobs"] == [-4.0, -4.1, 0.0, 0.0, -4.2, -4.3]
    assert (further["prompt_ids"], further["response_ids"], further["response_logprobs"]) == ([1], [2], [-0.5])
    assert datasets.load_dataset_builder(str(tmp_path / "set")).info.features == loaded["train"].features
    assert "Rollouts of language-model agents" in (tmp_path / "set" / "README.md").read_text()


def test_atif_documents_are_written_by_step_and_are_a_source_themselves(run, tmp_path):
    files = [*dumped_files(run, None, False), *dumped_files(run, 0, True)]

    exported = export_trajectories(Source(files), "atif", tmp_path / "atif")

    assert exported.trajectories == 6
    documents = atif_files(tmp_path / "atif")
    assert [str(file.relative_to(tmp_path / "atif")) for file in documents] == [
        "step_10/000002.json",
        "step_10/000003.json",
        "step_2/000000.json",
        "step_2/000001.json",
        "val_step_0/000004.json",
        "val_step_0/000005.json",
    ]
    export_trajectories(Source(documents), "chat", tmp_path / "back.jsonl", "step == 2")
    export_trajectories(Source(files), "chat", tmp_path / "direct.jsonl", "step == 2")
    assert (tmp_path / "back.jsonl").read_text() == (tmp_path / "direct.jsonl").read_text()


def test_the_other_files_of_a_harbor_job_are_no_documents(tmp_path):
    for name in ("result.json", "task/agent/trajectory.json", "task/agent/trajectory.cont-1.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")

    assert [file.name for file in atif_files(tmp_path)] == ["trajectory.cont-1.json", "trajectory.json"]


@pytest.mark.parametrize("kind", ["atif", "datasets", "chat"])
def test_nothing_is_left_of_an_export_without_trajectories(run, tmp_path, kind):
    source, before = Source(dumped_files(run, None, False)), set(tmp_path.iterdir())

    with pytest.raises(TrackwayError, match=r"expected trajectories that match, got none of 4; widen --where"):
        export_trajectories(source, kind, tmp_path / "target", "score > 5")

    assert set(tmp_path.iterdir()) == before


@pytest.mark.parametrize("kind", ["atif", "datasets", "chat"])
def test_an_existing_target_stays_as_it_is(run, tmp_path, kind):
    target = tmp_path / "target"
    target.write_text("mine")

    with pytest.raises(TrackwayError, match=r"expected a target that does not exist, got .*; give another one"):
        export_trajectories(Source(dumped_files(run, None, False)), kind, target)

    assert target.read_text() == "mine"


def test_a_run_without_such_trajectories_is_refused(run, tmp_path):
    with pytest.raises(TrackwayError, match=r"expected step_3.parquet in .*, got none; give another --step, or"):
        dumped_files(run, 3, False)
    with pytest.raises(TrackwayError, match=r"expected ATIF documents \(\*.json\) in .*, got none"):
        atif_files(tmp_path / "nowhere")


def test_the_guide_lists_each_column():
    guide = Path("docs/guides/runs.md").read_text()

    listed = guide.partition("`--where` compares")[2].partition(":\n")[2].partition(". ")[0]
    assert re.findall(r"`(\w+)`", listed) == list(COLUMNS)
