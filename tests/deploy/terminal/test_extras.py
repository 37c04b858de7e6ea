"""`trackway` with only some of its packages, and how little it imports before it needs them."""

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from trackway.deploy.terminal.entry import missing_extra

pytestmark = pytest.mark.slow

HEAVY = (
    "aiohttp datasets fastapi httpx hydra mlflow opentelemetry psutil pydantic_settings ray torch transformers "
    "trackway.wire.rollout uvicorn yaml"
)


def trackway(code: str, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """`trackway WORDS` in a process that first runs `code`."""
    program = f"import sys; {code}; from trackway.deploy.cli import main; main()"
    command = [sys.executable, "-c", program, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=cwd, check=False)


@pytest.mark.parametrize(
    ("module", "words", "extra"),
    [
        ("fastapi", ["up"], "cpu"),
        ("duckdb", ["console", "--port", "0"], "console"),
        ("hydra", ["demo"], "cpu"),
        ("hydra", ["config", "explain"], "trainer"),
        ("uvicorn", ["serve", "--port", "0", "tools"], "tools"),
        ("pyarrow", ["data", "make-tiny", "rows"], "trainer"),
    ],
)
def test_a_command_without_its_packages_names_the_extra_that_has_them(module, words, extra, tmp_path: Path):
    ended = trackway(f"sys.modules[{module!r}] = None", *words, cwd=tmp_path)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == (
        f"error: `trackway {words[0]}`: expected the packages of trackway[{extra}], got no module {module!r}; "
        f"install them: pip install 'trackway[{extra}]'\n"
    )


@pytest.mark.parametrize("name", ["trackway.gone", "mine.gone"])
def test_no_extra_is_named_for_a_module_of_ours_or_an_import_by_other_code(name: str):
    by = {"__name__": "trackway.here" if name.startswith("trackway") else "mine"}
    with pytest.raises(ModuleNotFoundError) as refused:
        exec(f"import {name}", by)  # the traceback's last frame is of the module in `by`

    assert missing_extra(refused.value) is None


def test_help_imports_no_service_and_no_http_client(tmp_path: Path):
    ended = trackway(
        f"import atexit; atexit.register(lambda: print([m for m in {HEAVY.split()} if m in sys.modules]))",
        "--help",
        cwd=tmp_path,
    )

    assert ended.stdout.splitlines()[-1] == "[]"
    assert "Find, draw, compare and check trajectory traces." in ended.stdout


def test_services_start_before_a_command_loads_torch(tmp_path: Path):
    found = "print({'mcp', 'ray', 'torch', 'transformers'} & {*sys.modules})"
    ended = trackway(
        f"import trackway.deploy.local.up as up; up.bring_up = lambda *given: sys.exit({found})", "demo", cwd=tmp_path
    )

    assert ended.stdout == "set()\n", ended.stderr


@pytest.mark.parametrize("name", ["evaluate", "trial"])
def test_rollouts_without_a_learner_load_no_torch(name: str, tmp_path: Path):
    program = f"import sys, trackway.deploy.runs.{name}; print({{'torch', 'transformers'}} & {{*sys.modules}})"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)

    assert ended.stdout == "set()\n", ended.stderr


def test_the_version_is_that_of_the_installed_package(tmp_path: Path):
    assert trackway("pass", "--version", cwd=tmp_path).stdout == f"trackway {version('trackway')}\n"


def test_the_shell_completes_commands_and_their_groups(tmp_path: Path):
    completing = "import os; os.environ.update(_TRACKWAY_COMPLETE='complete_bash', COMP_CWORD='2', COMP_WORDS={!r})"
    program = f"{completing.format('trackway traces ')}; sys.argv[0] = 'trackway'"

    assert trackway(program, cwd=tmp_path).stdout.split() == ["list", "show", "compare", "verify"]
