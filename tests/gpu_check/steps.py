"""The steps of `make gpu-check`: commands, the minutes that each may take, and the GPUs that it needs."""

import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic_core import from_json

ROOT = Path(__file__).resolve().parents[2]
PYTEST = "{python} -m pytest -q --junitxml {folder}/tests.xml"
TRAIN = (
    "{bin}/trackway init {folder}/my-agent >&2 && cd {folder}/my-agent && {bin}/trackway train --json {model}"
    " trainer.total_training_steps=10 trackway.sleep_timeout_s=120 "
)
STOP_S = 20.0
"""For a step past its deadline to stop what it started."""


@dataclass(frozen=True)
class Step:
    """A command of the shell, whose test report or whose output as JSON is the result.

    `{python}`, `{bin}` and `{vllm}` stand for the interpreter, its folder and vLLM's interpreter, `{folder}` for an
    empty folder, `{device}` for `cuda` or `cpu`, `{model}` for the key of the model that is trained, and `{shape}` for
    a model of `benchmarks/step.py`.
    """

    name: str
    command: str
    minutes: float
    gpus: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)


TWO = {"TRACKWAY_TEST_TENSOR_PARALLEL": "2"}
ENGINE = "TRACKWAY_ENGINE_PYTHON"
STEPS = (
    Step("numbers", "{python} -m tests.gpu_check.numbers --device {device}", 2.5),
    Step("vllm", PYTEST + " -m 'vllm and not extended' tests/vllm", 3.5),
    Step("ipc", PYTEST + " -m vllm tests/vllm/test_weight_transport.py", 1.5),
    Step("sglang", PYTEST + " -m sglang tests/sglang/core", 3.0),
    Step("train, embedded engine", TRAIN + "actor_rollout_ref.rollout.name=torch", 2.0),
    Step(
        "train, vLLM asleep in turn with the learner",
        TRAIN + "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.free_cache_engine=true",
        2.5,
        environment={ENGINE: "{vllm}"},
    ),
    Step(
        "step beside TRL",
        "{python} benchmarks/step.py --device {device} --model {shape} --contenders trackway,trl --rounds 1"
        " --steps 5 --warm 2 --json",
        2.5,
    ),
    Step("tokens a second beside vLLM alone", "{python} -m tests.gpu_check.speed {vllm} {device}", 2.5),
    Step(
        "ranks, one killed",
        PYTEST + " tests/services/learner/ranks/test_group.py -k"
        " 'what_one_process_does or killed_between or not_answer or dies_ends or exits_with_0'",
        5.0,
        gpus=2,
    ),
    Step("vllm, TP=2", PYTEST + " -m 'vllm and not extended' tests/vllm", 4.0, 2, TWO),
    Step("sglang, TP=2", PYTEST + " -m sglang tests/sglang/core", 4.0, 2, TWO),
    Step(
        "train, ranks and replicas on every GPU",
        TRAIN + "actor_rollout_ref.rollout.name=vllm actor_rollout_ref.rollout.free_cache_engine=true",
        5.0,
        2,
        environment={ENGINE: "{vllm}"},
    ),
)


def run(step: Step, folder: Path, words: Mapping[str, str], device: str) -> dict[str, Any]:
    """Run a step in `folder`, which is empty. Return its row of the page: status, seconds, result, end of its log."""
    words = {**words, "folder": str(folder), "device": device, "python": sys.executable, "bin": _bin()}
    command = step.command.format(**words)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([*map(str, _SOURCES), os.environ.get("PYTHONPATH", "")]),
        "TRACKWAY_TEST_DEVICE": device,
        "TRACKWAY_UP_OUTPUTS": str(folder / "outputs"),
        **{name: value.format(**words) for name, value in step.environment.items()},
    }
    began = time.monotonic()
    with (folder / "out").open("wb") as out, (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            ["bash", "-c", command], cwd=ROOT, env=environment, stdout=out, stderr=log, start_new_session=True
        )
        try:
            status = process.wait(step.minutes * 60)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _stop(process)
    result = _result(folder)
    passed = status == 0 and result is not None and result.get("passed") != 0
    row: dict[str, Any] = {
        "step": step.name,
        "status": "passed" if passed else "timed out" if status is None else "failed",
        "seconds": round(time.monotonic() - began, 1),
        "command": command,
        "result": result,
    }
    return row if passed else {**row, "log": _end(folder / "log") + ("" if result else _end(folder / "out"))}


_SOURCES = (ROOT, *(ROOT / name for name in ("services", "deploy", "clients")))


def _bin() -> str:
    return str(Path(sys.executable).parent)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """End what is left of the step's process group, with a moment to clean up."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)


def _result(folder: Path) -> dict[str, Any] | None:
    """What pytest reported, else the last JSON document of the output; None if there is neither."""
    report = folder / "tests.xml"
    if report.exists():
        cases = list(ElementTree.parse(report).getroot().iter("testcase"))
        bad = [(case, fault) for case in cases for fault in case if fault.tag in ("failure", "error")]
        skipped = [case.get("name") for case in cases if case.find("skipped") is not None]
        failed = {f"{case.get('classname')}.{case.get('name')}": fault.get("message", "")[:1000] for case, fault in bad}
        return {"passed": len(cases) - len(bad) - len(skipped), "failed": failed, "skipped": skipped}
    text = (folder / "out").read_text(errors="replace")
    for start in (place for place, character in enumerate(text) if character == "{" and text[:place].strip() == ""):
        with suppress(ValueError):
            return from_json(text[start:])
    return None


def _end(file: Path) -> str:
    return file.read_text(errors="replace")[-4000:]
