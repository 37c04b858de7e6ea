"""The steps run on the CPU as far as they go, and what does not hold, or runs too long, ends in exit status 1."""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch

from tests.gpu_check import __main__ as program
from tests.gpu_check import numbers, steps
from tests.gpu_check.checks import CHECKS, Finding, Subject
from tests.gpu_check.steps import ROOT, STEPS, Step

pytestmark = pytest.mark.slow


def page_of(path: Path, *words: str) -> tuple[int, dict]:
    status = program.main(["--report", str(path), *words])
    return status, json.loads(path.read_text())


@pytest.mark.extended  # computes what the learner's and the engines' own tests compute
def test_every_check_of_numbers_holds_on_the_cpu_and_the_page_has_them(tmp_path: Path) -> None:
    status, page = page_of(tmp_path / "page.json", "--device", "cpu", "--only", "numbers")

    assert (status, page["passed"], page["device"]) == (0, True, "cpu")
    assert f"torch {torch.__version__}" in page["machine"]["trackway"]
    [row] = page["steps"]
    assert (row["step"], row["status"], row["result"]["holds"]) == ("numbers", "passed", True)
    assert [*row["result"]["findings"]] == [*CHECKS]
    assert any("learner, of that product" in name for name in row["result"]["figures"])


def test_one_gpu_takes_at_most_20_minutes_and_several_at_most_40() -> None:
    assert sum(step.minutes for step in STEPS if step.gpus == 1) <= 20
    assert sum(step.minutes for step in STEPS) <= 40


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.name)
def test_what_a_step_runs_is_there(step: Step) -> None:
    words = shlex.split(step.command)
    named = [word for word in words if word.startswith(("tests/", "benchmarks/"))]
    named += [f"{word.replace('.', '/')}.py" for word in words if word.startswith("tests.")]

    assert [path for path in named if not (ROOT / path).exists()] == []
    assert named or "{bin}/trackway" in words


def test_a_step_of_tests_has_their_verdicts_and_needs_one_that_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_some.py").write_text(
        "import os, pytest\n"
        "def test_right(): assert os.environ['TRACKWAY_TEST_DEVICE'] == 'cpu'\n"
        "def test_wrong(): assert 1 == 2\n"
        "@pytest.mark.skip\ndef test_left_out(): pass\n"
    )
    command = f"{steps.PYTEST} --rootdir {tmp_path} -p no:cacheprovider -p no:schemathesis {tmp_path}/test_some.py"
    found = [Step("tests", command, 1.0), Step("nothing", f"{command} -k left_out", 1.0)]
    monkeypatch.setattr(program, "STEPS", [*found, Step("two", "false", 1.0, gpus=2)])

    status, page = page_of(tmp_path / "page.json", "--device", "cpu")

    assert (status, page["passed"]) == (1, False)
    assert [row["status"] for row in page["steps"]] == ["failed", "failed", "skipped"]
    first, nothing, two = page["steps"]
    assert (first["result"]["passed"], first["result"]["skipped"]) == (1, ["test_left_out"])
    assert [*first["result"]["failed"].values()] == ["assert 1 == 2"]
    assert nothing["result"] == {"passed": 0, "failed": {}, "skipped": ["test_left_out"]}
    assert two["why"] == "needs 2 GPUs, got 1"


def test_a_step_past_its_deadline_is_ended_with_what_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pid = tmp_path / "pid"
    late = Step("late", f"sleep 600 & echo $! > {pid}; echo began >&2; wait", 0.02)
    monkeypatch.setattr(program, "STEPS", [late])

    status, page = page_of(tmp_path / "page.json", "--device", "cpu")

    assert (status, page["steps"][0]["status"], page["steps"][0]["log"]) == (1, "timed out", "began\n")
    left = [p for p in psutil.process_iter(["pid"]) if p.pid == int(pid.read_text())]
    assert [p.pid for p in left if p.status() != psutil.STATUS_ZOMBIE] == []


@pytest.mark.parametrize(
    ("cuda", "driver", "problem"),
    [
        ("13.0", "535.104.05\n", "driver for CUDA 13.0 (580 or newer for 13, 525 for 12), got 535.104.05; update"),
        ("13.0", None, "expected a GPU, got no answer of `nvidia-smi`"),
        (None, "580.1\n", "expected a build of PyTorch for CUDA, got "),
    ],
)
def test_a_machine_without_a_usable_gpu_is_an_error_that_names_the_driver(
    cuda: str | None,
    driver: str | None,
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(program, "_output", lambda command: driver)

    assert program.main(["--report", str(tmp_path / "page.json")]) == 2
    assert problem in capsys.readouterr().err
    assert not (tmp_path / "page.json").exists()


@pytest.mark.extended  # imports torch and transformers twice; the imports of numbers.py rarely change
def test_the_step_numbers_needs_neither_ray_nor_a_backend_of_traces() -> None:
    hidden = "".join(
        f"sys.modules[{name!r}] = None; " for name in ("ray", "mlflow", "wandb", "weave", "vllm", "sglang")
    )
    command = "import sys; {}from tests.gpu_check.{} import main; main(['--help'])"
    for module in ("__main__", "numbers"):
        done = subprocess.run(
            [sys.executable, "-c", command.format(hidden, module)], capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("usage: ")


def test_a_check_that_fails_or_does_not_hold_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(subject: Subject, folder: Path) -> list[Finding]:
        raise RuntimeError("no kernel")

    checks = {"off": lambda subject, folder: [Finding.below("difference", float("nan"), 0.5)], "broken": broken}
    monkeypatch.setattr(numbers, "CHECKS", checks)
    monkeypatch.setattr(numbers, "measure", lambda *_: {})

    assert numbers.main(["--device", "cpu"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    assert found["off"] == [{"what": "difference", "expected": "<= 0.5", "got": "nan", "holds": False}]
    assert found["broken"][0]["got"] == "RuntimeError: no kernel"
