"""The environment of a vLLM or SGLang server is looked at before anything starts."""

import sys
from pathlib import Path

import pytest

from trackway.deploy.config.serve_config import check_engine_python
from trackway.system.process import UserError


@pytest.fixture(autouse=True)
def no_engine_of_the_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TRACKWAY_ENGINE_PYTHON", "TRACKWAY_ENGINE_URL", "TRACKWAY_ENGINE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            {},
            "rollout engine sglang: expected an engine_python, got none; install sglang into a separate environment",
        ),
        ({"engine_python": "/nowhere/python"}, "expected an interpreter, got engine_python /nowhere/python; install"),
        ({"engine_python": "/"}, "expected an interpreter, got engine_python /; install"),
        ({"engine_python": sys.executable}, f"expected it in the environment of {sys.executable}, got none; install"),
    ],
)
def test_an_environment_that_lacks_the_engine_is_named_with_the_remedy(args: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        check_engine_python({"engine": "sglang", **args})


def test_an_environment_with_the_engine_passes(other_environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [packages] = other_environment.parents[1].glob("lib/python3*/site-packages")
    (packages / "sglang").mkdir()
    (packages / "sglang" / "__init__.py").touch()

    check_engine_python({"engine": "sglang", "engine_python": other_environment})
    monkeypatch.setenv("TRACKWAY_ENGINE_PYTHON", str(other_environment))
    check_engine_python({"engine": "sglang"})


@pytest.mark.parametrize("args", [{}, {"engine": "torch"}, {"engine": "vllm", "engine_url": "http://there"}])
def test_an_engine_without_a_server_to_start_needs_no_environment(args: dict[str, str]) -> None:
    check_engine_python(args)
