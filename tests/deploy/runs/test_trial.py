"""`trackway try`: rows, tools, scorer and loop are checked, then trajectories run without Ray."""

import json
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from trackway.deploy.commands.new_project import templates, write_project
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.prepare import prepare
from trackway.deploy.runs.trial import Trial, Tried, advantages_of, trial_report
from trackway.run_config import resolve
from trackway.system.process import UserError
from trackway.wire.agent import RewardModel, Sample
from trackway.wire.chat import FunctionCall, Message, ToolCall
from trackway.wire.errors import ErrorBody, ErrorCode, TrackwayError
from trackway.wire.trajectory import Reward, StopReason, Tags, Timings, ToolCallRecord, Trajectory, Turn

pytestmark = pytest.mark.slow

Made = Callable[..., Path]


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Made:
    """`project("tutor")`: a new project, which is the working folder from now on."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def make(name: str, template: str = "calculator") -> Path:
        write_project(tmp_path / name, template)
        monkeypatch.chdir(tmp_path / name)
        return tmp_path / name

    return make


def trial_of(*overrides: str, rows: Path | None = Path("rows.jsonl"), outputs: Path = Path("outputs")) -> Trial:
    return Trial(prepare(overrides, None, "default", UpSettings(outputs=outputs), trial=True), rows)


def tried(*overrides: str, row: int = 1, n: int = 1) -> Tried:
    prepared = trial_of(*overrides)
    findings, rows = prepared.check(lambda name, state: None)
    findings.refuse()
    assert rows is not None
    return prepared.run(rows, row, n, lambda name, state: None)


def problems(rows: str = "rows.jsonl") -> tuple[list[str], list[str]]:
    findings, _ = trial_of(rows=Path(rows)).check(lambda name, state: None)
    return findings.wrong, [*findings.not_found, *findings.missing_here]


def trackway(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trackway.deploy.cli", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=cwd, check=False)


@pytest.mark.slow
def test_a_trajectory_has_the_projects_loop_tool_and_reward_and_is_the_same_again(project: Made) -> None:
    project("tried_once")

    [first], [again], [reseeded] = (tried(*words).trajectories for words in ((), (), ("trackway.seed=7",)))

    assert (first.agent_name, first.data_source, first.error) == ("tried_once", "tried_once", None)
    assert first.reward is not None and {"acc", "failed_calls", "tool/calculator"} == first.reward.components.keys()
    assert [call.tool for turn in first.turns for call in turn.calls] == ["calculator"]
    assert first.response_ids == again.response_ids != reseeded.response_ids
    assert first.trace_id is None


@pytest.mark.slow
def test_a_group_has_an_advantage_for_each_rollout(project: Made) -> None:
    project("tried_group")

    group = tried(row=2, n=8)

    assert group.row == 2 and [trajectory.tags.rollout_n for trajectory in group.trajectories] == list(range(8))
    assert {trajectory.tags.sample_index for trajectory in group.trajectories} == {1}
    assert group.advantages == advantages_of(group.trajectories, resolve({})) and None not in group.advantages


@pytest.mark.slow
@pytest.mark.parametrize(
    "template",
    [
        pytest.param(name, marks=pytest.mark.program("bwrap") if name == "python" else pytest.mark.extended)
        for name in templates()
    ],
)
def test_the_own_test_of_a_new_project_passes(template: str, project: Made) -> None:
    folder = project("tried-" + template, template)

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=240, check=False)

    assert ran.returncode == 0, ran.stdout


@pytest.mark.slow
def test_it_needs_no_ray_and_prints_one_document_with_json(project: Made) -> None:
    folder = project("tried_json")
    program = "import sys; sys.modules['ray'] = None; from trackway.deploy.cli import main; main()"

    command = [sys.executable, "-c", program, "try", "--json", "trackway.seed=3"]
    ran = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)

    assert ran.returncode == 0, ran.stderr
    document = json.loads(ran.stdout)
    assert (document["file"], document["row"], len(document["trajectories"])) == (str(folder / "rows.jsonl"), 1, 1)
    assert not (folder / "outputs").exists()


@pytest.mark.slow
def test_a_loop_that_fails_is_told_with_its_error_and_exit_status_1(project: Made) -> None:
    folder = project("tried_loop")
    loop = folder / "tried_loop.py"
    loop.write_text(
        loop.read_text().replace("await self.begin(", "raise LookupError('no such key')\n        await self.begin(")
    )

    ran = trackway("try", "rows.jsonl", cwd=folder)

    assert ran.returncode == 1
    shown = " ".join(ran.stdout.split())
    assert "error internal: agent loop 'tried_loop' failed: LookupError: no such key" in shown
    assert 'tried_loop.py", line' in ran.stderr  # the traceback


def test_a_reward_that_returns_text_is_told_with_its_traceback(project: Made) -> None:
    folder = project("texts")
    (folder / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info): return 'good'\n"
    )

    ran = trackway("try", "rows.jsonl", cwd=folder)

    assert ran.returncode == 1
    what = "TypeError: expected it to return a number or a dict with 'score', got str 'good'"
    shown = " ".join(ran.stdout.split())
    assert f"scorer 'reward.py:compute_score' failed: {what}; the reward service logged the traceback" in shown
    logged = ran.stderr.partition("scorer 'reward.py:compute_score' failed\n")[2]
    assert logged.lstrip().startswith("Traceback (most recent call last):") and f"  {what}\n" in logged
    assert "During handling" not in logged


def test_rows_that_do_not_fit_are_named_with_line_and_field(project: Made) -> None:
    folder = project("tried_rows")
    lines = (folder / "rows.jsonl").read_text().splitlines()
    lines[1] = lines[1].replace('"role": "user"', '"role": 5')
    lines[2] = "{"
    lines[3] = lines[3].replace('"tried_rows", "prompt"', '"another_loop", "prompt"')
    (folder / "rows.jsonl").write_text("\n".join(lines))

    wrong, _ = problems()

    assert len(wrong) == 1
    assert f"{folder}/rows.jsonl:2: expected verl's row schema, got prompt.0.role" in wrong[0]
    assert f"{folder}/rows.jsonl:3: expected a JSON object, got a line that does not parse" in wrong[0]

    (folder / "rows.jsonl").write_text(lines[3])
    assert "got 'another_loop' in 1 of 1 rows" in problems()[0][0]


def test_code_that_does_not_import_is_named_once_with_its_line(project: Made) -> None:
    folder = project("tried_code")
    (folder / "tried_code.py").write_text("\nfrom trackway.agent import NoSuchLoop\n")

    wrong, [missing] = problems()

    assert wrong == []
    assert missing.startswith("agent loops, scorers, tools: ")
    assert "cannot import name 'NoSuchLoop'" in missing and f"({folder}/tried_code.py:2)" in missing


def test_a_tool_and_a_scorer_that_do_not_load_are_both_named(project: Made) -> None:
    folder = project("tried_parts")
    (folder / "tool.py").write_text("import re\n1 / 0\n")
    (folder / "reward.py").write_text("def score(): ...\n")

    scorer, tool = problems()[0]

    assert scorer.startswith("scorers: ") and "which has score, got 'compute_score'" in scorer
    assert tool.startswith("tools: ") and f"ZeroDivisionError: division by zero ({folder}/tool.py:2)" in tool


def test_a_row_that_is_not_there_is_refused_with_the_last_one(project: Made) -> None:
    project("tried_last")

    with pytest.raises(
        UserError, match="--row: expected the number of a row, counted from 1, got 49: the last row is 48"
    ):
        tried(row=49)


def test_a_row_that_is_too_long_to_train_on_is_refused(project: Made) -> None:
    project("tried_long")

    with pytest.raises(UserError, match=r"got 1: its prompt is longer than data\.max_prompt_length"):
        tried("data.filter_overlong_prompts=true", "data.max_prompt_length=36")


def test_without_rows_the_message_says_how_to_name_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(UserError, match="expected a file of rows, got none; name one: trackway try"):
        trial_of(rows=None, outputs=tmp_path)


def trajectory(rollout_n: int, score: float | None, error: ErrorBody | None = None) -> Trajectory:
    call = ToolCall(id="call_0_0", function=FunctionCall(name="calculator", arguments='{"expression": "12-5"}'))
    record = ToolCallRecord(tool="calculator", tool_call_id="call_0_0", seconds=0.25, reward=-0.05)
    messages = [
        Message(role="assistant", content="", tool_calls=[call]),
        Message(role="tool", content="7", tool_call_id="call_0_0"),
    ]
    answer = [Message(role="assistant", content="#### [b]7[/b]\x1b[31m")]
    return Trajectory(
        id=f"try/0/1/{rollout_n}",
        session_id=f"try/0/1/{rollout_n}",
        tags=Tags(experiment_name="e", step=0, sample_index=1, rollout_n=rollout_n),
        agent_name="tutor",
        data_source="tutor",
        prompt_ids=[1] * 30,
        response_ids=[1] * 12,
        response_mask=[1] * 8 + [0] * 3 + [1],
        response_logprobs=[-1.0] * 12,
        turns=[
            Turn(index=0, messages=messages, response_start=0, response_end=8, finish_reason="stop", calls=[record],
                 generate_s=0.5),
            Turn(index=1, messages=answer, response_start=11, response_end=12, finish_reason="stop", generate_s=0.1),
        ],
        reward=None if score is None else Reward(score=score, components={"acc": 1.0}),
        stop_reason=StopReason.ERROR if error else StopReason.ANSWERED,
        timings=Timings(generate_sequences=0.6, tool_calls=0.25, compute_score=0.05, total=1.0),
        error=error,
    )  # fmt: skip


def shown(*trajectories: Trajectory) -> list[str]:
    sample = Sample(
        data_source="tutor",
        prompt=[Message(role="user", content="Tom had 12 pens and lost 5 of them. How many does he have?")],
        reward_model=RewardModel(ground_truth="7"),
    )
    values = Tried(
        file="/d/rows.jsonl",
        row=3,
        sample=sample,
        trajectories=[*trajectories],
        advantages=advantages_of([*trajectories], resolve({})),
    )
    console = Console(file=StringIO(), width=120)
    console.print(trial_report(values, 64))
    text = console.file.getvalue()  # pyright: ignore[reportAttributeAccessIssue]
    return [" ".join(line.split()) for line in text.splitlines() if line.strip() and "────" not in line]


def test_a_trajectory_is_shown_turn_by_turn_with_tokens_and_seconds() -> None:
    assert shown(trajectory(0, 0.9)) == [
        "/d/rows.jsonl row 3 loop tutor data source tutor ground truth 7",
        "user Tom had 12 pens and lost 5 of them. How many does he have?",
        'assistant calculator({"expression": "12-5"}) 8 tokens, 0.50 s',
        "tool 7 calculator, 0.25 s, step reward -0.05",
        "assistant #### [b]7[/b]\\x1b[31m 1 tokens, 0.10 s",
        "reward 0.9 acc 1",
        "end answered after 2 turns",
        "tokens prompt 30, response 12 of at most 64: model 9, tool results and template 3",
        "seconds 1.00: model 0.60, tools 0.25, scorer 0.05, rest 0.10",
    ]


def test_a_failed_call_is_shown_with_its_message_and_the_line_that_raised_it() -> None:
    failing = trajectory(0, 0.0)
    failing.turns[0].calls[0].error = ErrorCode.TOOL_FAILED
    failing.turns[0].calls[0].message = "tool 'calculator' failed in execute: KeyError: 'k' (/d/tools.py:7)"

    assert [line for line in shown(failing) if line.startswith("failed call")] == [
        "failed call calculator: tool 'calculator' failed in execute: KeyError: 'k' (/d/tools.py:7)"
    ]


def test_a_group_is_a_table_with_the_best_and_the_worst_in_full() -> None:
    lines = shown(trajectory(0, 0.0), trajectory(1, 1.0), trajectory(2, 0.5))

    assert lines[2:6] == [
        "rollout reward advantage turns calls tokens seconds end answer",
        "0 0 -1.00 2 1 12 1.00 answered #### [b]7[/b]\\x1b[31m",
        "1 1 +1.00 2 1 12 1.00 answered #### [b]7[/b]\\x1b[31m",
        "2 0.5 +0.00 2 1 12 1.00 answered #### [b]7[/b]\\x1b[31m",
    ]
    assert [line for line in lines if line.startswith("reward ")] == ["reward 1 acc 1", "reward 0 acc 1"]


def test_a_group_of_equal_rewards_is_said_to_teach_nothing() -> None:
    assert any("all rewards are equal" in line for line in shown(trajectory(0, 1.0), trajectory(1, 1.0)))
    assert not any("all rewards are equal" in line for line in shown(trajectory(0, 1.0), trajectory(1, 0.0)))


def test_a_failed_trajectory_is_shown_first_and_left_out_of_the_advantages() -> None:
    error = TrackwayError(ErrorCode.INTERNAL, "the scorer raised [red]LookupError[/red]").to_reply().error

    lines = shown(trajectory(0, 1.0), trajectory(1, None, error), trajectory(2, 0.0))

    assert "1 none left out 2 1 12 1.00 internal #### [b]7[/b]\\x1b[31m" in lines
    assert "error internal: the scorer raised [red]LookupError[/red]" in lines
    assert [line for line in lines if line.startswith("reward ")] == []
