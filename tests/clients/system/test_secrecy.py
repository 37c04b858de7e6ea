"""Secrets of a process, and who can read them."""

import inspect
import os
import subprocess
import sys

import pytest

from trackway.system import refuse_inspection, secrets_in, without_secrets

OURS = {
    "TRACKWAY_TOKEN": "1",
    "TRACKWAY_AUTH__TOKENS__OPS__SECRET": "2",
    "RAY_AUTH_TOKEN": "3",
    "WANDB_API_KEY": "4",
    "MLFLOW_TRACKING_URI": "http://user:5@host",
    "MLFLOW_TRACKING_PASSWORD": "6",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=7",
    "OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=8",
}
OTHERS = {"PATH": "/bin", "HF_TOKEN": "9", "MY_TRACKWAY_TOKEN": "10", "VLLM_HOST_IP": "10.0.0.1"}


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
@pytest.mark.parametrize(
    ("first", "seen"),
    [("", "True\n"), (f"import ctypes, sys\n{inspect.getsource(refuse_inspection)}refuse_inspection()\n", "")],
    ids=["any process", "one that refuses inspection"],
)
def test_another_process_of_the_same_ordinary_user_reads_the_environment(first: str, seen: str) -> None:
    ordinary = {"user": 65534, "group": 65534, "extra_groups": []} if os.geteuid() == 0 else {}
    python = "/usr/bin/python3" if ordinary else sys.executable  # root's own may be out of reach
    if not os.access(python, os.X_OK):
        pytest.skip(f"an ordinary user needs {python}")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    hides = f"{first}print(flush=True); input()"
    with subprocess.Popen([python, "-c", hides], env={"SECRET": "s3cret"}, cwd="/", **ordinary, **pipes) as process:
        assert process.stdout is not None and process.stdout.readline() == "\n"
        code = f"print(b's3cret' in open('/proc/{process.pid}/environ', 'rb').read())"
        reader = subprocess.run(
            [python, "-c", code], cwd="/", env={}, capture_output=True, text=True, check=False, **ordinary
        )
        process.communicate("\n", timeout=10)

    assert reader.stdout == seen
    assert ("PermissionError" in reader.stderr) == (seen == "")


def test_the_environment_is_divided_into_trackways_secrets_and_the_rest() -> None:
    assert secrets_in({**OURS, **OTHERS}) == OURS
    assert without_secrets({**OURS, **OTHERS}) == OTHERS
