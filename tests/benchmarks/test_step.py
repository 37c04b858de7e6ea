"""The pure parts of `benchmarks/step.py`: the work that every contender does, and what is made of its events."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from benchmarks.checkout import interpreter
from benchmarks.step_report import Round, process_name, report, table
from benchmarks.step_work import Events, Work, calculate, called, score, scripted_model

from trackway.deploy.bundled import TINY_MODEL


def work(folder: Path, **given: int) -> Work:
    sizes = {"prompts": 12, "samples": 8, "turns": 2, "warm": 1, "steps": 2, "threads": 1, "seed": 0} | given
    return Work(folder=str(folder), model="m", tracing=True, device="cpu", learning_rate=5e-4, **sizes)


def ended(clocks: list[float], cpu: list[dict[str, float]], machine: list[float]) -> list[dict[str, object]]:
    """Events of steps 1, 2, ... and an end."""
    steps = zip(clocks, cpu, machine, strict=True)
    events: list[dict[str, object]] = [
        {"step": number, "clock_s": clock, "cpu_s": spent, "machine_s": busy, "tokens": 100.0 * number}
        for number, (clock, spent, busy) in enumerate(steps, 1)
    ]
    return [*events, {"end": {"niceness": {"process": 0}}}]


def of(wall_s: list[float], cpu_s: dict[str, float]) -> Round:
    return Round(wall_s, cpu_s, 0.0, {"tokens": 7.0})


def test_a_round_leaves_out_the_warm_up_and_averages_cpu_by_process() -> None:
    cpu = [{"rollout": 9.0}, {"rollout": 10.0, "learner": 1.0}, {"rollout": 12.0, "learner": 2.0}]

    found = Round.of(ended([20.0, 22.0, 23.0], cpu, [50.0, 54.0, 57.0]), warm=1, steps=2)

    assert found.wall_s == [2.0, 1.0]
    assert found.cpu_s == {"learner": 1.0, "rollout": 1.5}
    assert found.others_cores == pytest.approx((7.0 - 5.0) / 3.0)
    assert found.reported == {"tokens": 250.0, "niceness": {"process": 0}}


@pytest.mark.parametrize(("steps", "missing"), [(3, r"no \[4\]"), (2, "no end")])
def test_a_round_without_a_step_or_its_end_is_refused(steps: int, missing: str) -> None:
    events = ended([1.0, 2.0, 3.0], [{}, {}, {}], [0.0, 0.0, 0.0])

    with pytest.raises(ValueError, match=missing):
        Round.of(events if steps == 3 else events[:-1], warm=1, steps=steps)


def test_ratios_are_medians_of_the_ratios_within_a_round() -> None:
    trl = [of([1.0, 1.0, 5.0], {"process": 1.0}), of([2.0], {"process": 2.0}), of([1.0], {"process": 1.0})]
    ours = [of([3.0], {"a": 1.0, "b": 1.0}), of([2.0], {"a": 3.0, "b": 3.0}), of([8.0], {"a": 2.0, "b": 2.0})]

    found = report({"trackway": ours, "trl": trl})

    assert (found["wall_ratio_trl"], found["cpu_ratio_trl"]) == (3.0, 3.0)
    assert found["contenders"]["trackway"]["cpu_s_by_process"] == {"a": 2.0, "b": 2.0}
    assert found["contenders"]["trl"]["wall_s"] == 1.0
    assert "trackway                     3.00     4.00" in table(found)


def test_without_trl_there_is_no_ratio() -> None:
    assert "wall_ratio_trl" not in report({"plain": [of([1.0], {"process": 1.0})]})


@pytest.mark.parametrize(
    ("command", "name"),
    [
        ("ray::ServeReplica:rollout:rollout", "rollout"),
        ("ray::ServeReplica:agent:agent.handle_request", "agent"),
        ("ray::ProxyActor", "Serve's proxy"),
        ("ray::ServeController.listen_for_change", "Serve's controller"),
        ("/v/python -m trackway.trainer.worker /o/step --lifeline", "learner"),
        ("/v/ray/core/src/ray/raylet/raylet --dashboard_agent_command=/v/ray/dashboard/agent.py", "raylet"),
        ("/v/python -m ray.scripts.scripts start --head --dashboard-port=1", "other processes of Ray"),
        ("ray::IDLE", "other processes of Ray"),
    ],
)
def test_processes_are_named_by_what_they_do(command: str, name: str) -> None:
    assert process_name(command) == name


@pytest.mark.parametrize(
    ("sizes", "micro_batch"),
    [({}, 96), ({"prompts": 48}, 192), ({"turns": 32}, 24), ({"prompts": 1, "samples": 7, "turns": 200}, 1)],
)
def test_a_pass_has_at_most_16384_tokens_and_divides_the_batch(sizes: dict[str, int], micro_batch: int) -> None:
    assert work(Path("nowhere"), **sizes).micro_batch == micro_batch


@pytest.mark.parametrize(
    ("expression", "result"),
    [("12-5", "7"), ("3 * 7", "21"), ("10/4", "2.5"), ("8/2", "4"), ("1/0", "Error: division by zero")],
)
def test_the_calculator(expression: str, result: str) -> None:
    assert calculate(expression) == result


def test_the_calculator_says_what_it_cannot_read() -> None:
    assert calculate("2+") == "Error: expected two numbers and an operation, got '2+'"


def test_the_last_answer_counts() -> None:
    assert (score("#### 4 and #### 7", "7"), score("#### 7 and #### 4", "7"), score("7", "7")) == (1.0, 0.0, 0.0)


def test_a_contender_reads_the_work_and_tells_its_steps(tmp_path: Path) -> None:
    given = work(tmp_path, turns=8)
    events = Events(Work.read(str(given.save())))

    events.step(1, {"process": 2.0}, tokens=3.0)
    events.end(niceness={"process": 5})

    lines = (tmp_path / "events.jsonl").read_text().splitlines()
    assert Work.read(str(tmp_path / "work.json")) == given
    assert '"step": 1' in lines[0]
    assert '"cpu_s": {"process": 2.0}' in lines[0]
    assert lines[1] == '{"end": {"niceness": {"process": 5}}}'


def test_the_scripted_model_calls_the_calculator_with_eight_tokens_in_each_turn(tmp_path: Path) -> None:
    import torch
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    scripted_model(tmp_path, "tiny", TINY_MODEL)
    model, tokenizer = Qwen3ForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    tool = "<|im_start|>tool\n11<|im_end|>\n<|im_start|>assistant\n"
    prompts = tokenizer(["<|im_start|>user\nHow many?<|im_end|>\n<|im_start|>assistant\n", tool], padding=True)
    inputs = {name: torch.tensor(rows).repeat(8, 1) for name, rows in prompts.items()}
    made = model.generate(  # pyright: ignore[reportCallIssue, reportAttributeAccessIssue]  a mixin's method
        **inputs, do_sample=True, top_k=0, max_new_tokens=8
    )
    texts = tokenizer.batch_decode(made[:, -8:])

    expressions = {called(text) for text in texts}
    assert all(text.endswith("</tool_call><|im_end|>") for text in texts)
    assert None not in expressions
    assert len(expressions) > 1
    assert {len(calculate(expression or "")) for expression in expressions} <= {1, 2}


def test_a_checkout_needs_the_three_folders(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]

    assert interpreter(root)[1] == ":".join(str(root / part) for part in ("services", "clients", "deploy"))
    with pytest.raises(ValueError, match=r"expected the root of a checkout of Trackway, got .*services"):
        interpreter(tmp_path)


def test_a_command_starts_again_on_the_checkout_at_ray_workers_own_niceness(tmp_path: Path) -> None:
    for part in ("services", "clients", "deploy"):
        (tmp_path / part / "trackway").mkdir(parents=True)
    (tmp_path / "clients/trackway/probe.py").write_text("NAME = 'of the checkout'")
    script = tmp_path / "command.py"
    script.write_text(
        "import argparse, os, pathlib, sys\n"
        f"sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from benchmarks.checkout import run_in\n"
        "run_in(pathlib.Path(sys.argv[1]), argparse.ArgumentParser())\n"
        "import trackway.probe\n"
        "print(trackway.probe.NAME, os.environ['RAY_worker_niceness'])\n"
    )
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    done = subprocess.run([sys.executable, script, tmp_path], env=environment, capture_output=True, text=True)

    assert (done.stdout, done.stderr) == ("of the checkout 0\n", "")
