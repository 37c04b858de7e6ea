"""The checks hold on the CPU, and a property that does not hold, or a check that fails, ends in exit status 1."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu_check import __main__ as program
from tests.gpu_check.checks import CHECKS, Subject
from tests.gpu_check.findings import Finding

pytestmark = pytest.mark.slow


def test_every_check_holds_on_the_cpu(tmp_path: Path) -> None:
    page = tmp_path / "report.md"
    status = program.main(["--device", "cpu", "--report", str(page)])

    lines = page.read_text().splitlines()
    assert status == 0
    assert {line.split(":")[0].removeprefix("| ") for line in lines if line.endswith("| ok |")} == set(CHECKS)
    assert any("learner, of that product" in line for line in lines)


def test_it_needs_neither_ray_nor_a_backend_of_traces() -> None:
    hidden = "".join(
        f"sys.modules[{name!r}] = None; " for name in ("ray", "mlflow", "wandb", "weave", "vllm", "sglang")
    )
    command = [sys.executable, "-c", f"import sys; {hidden}from tests.gpu_check.__main__ import main; main(['--help'])"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: ")


def test_what_does_not_hold_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def broken(subject: Subject, folder: Path) -> list[Finding]:
        raise RuntimeError("no kernel")

    checks = {"off": lambda subject, folder: [Finding.below("difference", float("nan"), 0.5)], "broken": broken}
    monkeypatch.setattr(program, "CHECKS", checks)

    assert program.main(["--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "| off: difference | <= 0.5 | nan | **FAILED** |" in shown
    assert "| broken: runs | no error | RuntimeError: no kernel | **FAILED** |" in shown
