"""The mutation tool on a module of a few lines: its verdicts, table and exit status, and what a second run does."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import until

pytestmark = [pytest.mark.slow, pytest.mark.mutants]

TOOL = Path(__file__).with_name("mutants.py")
HEAD = "| module | mutants | killed | survived | equivalent | not run | score |"
MODULE = """\
def is_adult(age: int) -> bool:
    return age >= 18
"""
TESTS = """\
import module
from pathlib import Path

with Path("runs").open("a") as file:
    file.write("run\\n")


def test_adults():
    assert module.is_adult(30)


def test_children():
    assert not module.is_adult(5)
"""
BOUNDARY = """\


def test_the_boundary():
    assert module.is_adult(18)
    assert not module.is_adult(17)
"""
LOOP = """\
def down(number: int) -> int:
    while number > 0:
        number = number - 1
    return number
"""
TESTS_OF_LOOP = """\
import module
import os
from pathlib import Path

with Path("runs").open("a") as file:
    print(os.getpid(), file=file)


def test_down():
    assert module.down(3) == 0
"""
CONFIG = """\
score = 95.0
limit_factor = 1.0
limit_extra_s = {limit_extra_s}
operators = [{operators}]

[[modules]]
path = "module.py"
tests = ["tests/test_module.py"]
"""
BOUND, SIGN = "ReplaceComparisonOperator_GtE_Gt", "ReplaceComparisonOperator_GtE_Lt"
"""age > 18, which TESTS do not notice, and age < 18, which they do."""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with the module and tests that pass."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "pytest.ini").write_text("[pytest]\npythonpath = .\n")
    write(tmp_path, MODULE, TESTS)
    configure(tmp_path, BOUND, SIGN)
    return tmp_path


def write(project: Path, module: str, tests: str) -> None:
    (project / "module.py").write_text(module)
    (project / "tests" / "test_module.py").write_text(tests)


def configure(project: Path, *operators: str, more: str = "", limit_extra_s: float = 20.0) -> None:
    names = ", ".join(f'"{name}"' for name in operators)
    (project / "tests" / "mutants.toml").write_text(CONFIG.format(operators=names, limit_extra_s=limit_extra_s) + more)


def equivalent(line: str, mutant: str) -> str:
    return f'\n[[equivalents]]\npath = "module.py"\nline = "{line}"\nmutant = "{mutant}"\nreason = "nobody is 18"\n'


def start(project: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, str(TOOL), "--config", str(project / "tests" / "mutants.toml"), *arguments]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    return subprocess.Popen(
        command, cwd=project, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def mutate(project: Path, *arguments: str) -> tuple[int, str]:
    """The exit status and the output of a run."""
    process = start(project, *arguments)
    output, _ = process.communicate(timeout=120)
    return process.returncode, output


def row(output: str) -> str:
    """That of the module in the table."""
    assert HEAD in output, output
    (line,) = [line for line in output.splitlines() if line.startswith("| `module.py`")]
    return line.removeprefix("| `module.py` | ").removesuffix(" |")


def runs(project: Path) -> int:
    """How often the tests have been run."""
    return len((project / "runs").read_text().splitlines())


def test_a_mutant_that_fails_a_test_is_killed_and_one_that_fails_none_survives_and_is_named(project: Path):
    status, output = mutate(project)

    assert row(output) == "2 | 1 | 1 | 0 | 0 | 50.0 %"
    assert "survived: module.py:2: return age >= 18  ->  return age > 18\n" in output
    assert status == 1
    assert (project / "module.py").read_text() == MODULE


def test_a_score_that_is_reached_is_exit_status_0(project: Path):
    write(project, MODULE, TESTS + BOUNDARY)

    status, output = mutate(project)

    assert (status, row(output)) == (0, "2 | 2 | 0 | 0 | 0 | 100.0 %")


def test_an_equivalent_mutant_is_not_run_and_does_not_count(project: Path):
    configure(project, BOUND, SIGN, more=equivalent("return age >= 18", "return age > 18"))

    status, output = mutate(project)

    assert (status, row(output)) == (0, "2 | 1 | 0 | 1 | 0 | 100.0 %")
    assert runs(project) == 3  # twice unchanged, once with the other mutant


def test_an_equivalent_that_is_no_mutant_of_the_module_any_more_is_an_error(project: Path):
    configure(project, BOUND, more=equivalent("return age >= 21", "return age > 21"))

    status, output = mutate(project)

    assert status == 1
    assert output.startswith(
        "expected mutants of module.py under [[equivalents]], got 'return age >= 21' -> 'return age > 21'"
    )


def test_a_mutant_that_never_ends_is_killed_when_its_time_is_up(project: Path):
    write(project, LOOP, TESTS_OF_LOOP)
    configure(project, "ReplaceBinaryOperator_Sub_Add", limit_extra_s=2.0)

    status, output = mutate(project)

    assert (status, row(output)) == (0, "1 | 1 | 0 | 0 | 0 | 100.0 %")


def test_an_interrupted_run_leaves_no_process_behind(project: Path):
    write(project, LOOP, TESTS_OF_LOOP)
    configure(project, "ReplaceBinaryOperator_Sub_Add", limit_extra_s=60.0)
    process = start(project)
    until(lambda: (project / "runs").exists() and runs(project) == 3)  # twice unchanged, then the mutant
    mutant = int((project / "runs").read_text().splitlines()[-1])

    process.send_signal(signal.SIGINT)
    process.communicate(timeout=30)

    until(lambda: not Path(f"/proc/{mutant}").exists())


def test_a_mutant_that_cannot_be_imported_is_killed(project: Path):
    write(project, "assert 2 > 1\n", "import module\n\n\ndef test_nothing():\n    assert module\n")
    configure(project, "ReplaceComparisonOperator_Gt_LtE")

    assert row(mutate(project)[1]) == "1 | 1 | 0 | 0 | 0 | 100.0 %"


def test_a_run_without_time_runs_nothing_and_is_no_success(project: Path):
    status, output = mutate(project, "--minutes", "0")

    assert (status, row(output)) == (1, "2 | 0 | 0 | 0 | 2 | 100.0 %")
    assert not (project / "runs").exists()


def test_a_run_goes_on_from_the_verdicts_of_the_one_before(project: Path):
    mutate(project)
    verdicts = project / "outputs" / "mutants.jsonl"
    first, second = verdicts.read_text().splitlines(keepends=True)
    before = runs(project)

    assert row(mutate(project)[1]) == "2 | 1 | 1 | 0 | 0 | 50.0 %"
    assert runs(project) == before

    verdicts.write_text(first)
    assert row(mutate(project)[1]) == "2 | 1 | 1 | 0 | 0 | 50.0 %"
    assert (runs(project), verdicts.read_text()) == (before + 3, first + second)


def test_verdicts_are_of_the_module_and_the_tests_as_they_were(project: Path):
    mutate(project)
    write(project, MODULE, TESTS + BOUNDARY)

    assert row(mutate(project)[1]) == "2 | 2 | 0 | 0 | 0 | 100.0 %"


def test_runs_beside_each_other_lose_no_verdict(project: Path):
    (project / "other.py").write_text(MODULE.replace("18", "21"))
    (project / "tests" / "test_other.py").write_text(TESTS.replace("module", "other"))
    configure(project, BOUND, SIGN, more='\n[[modules]]\npath = "other.py"\ntests = ["tests/test_other.py"]\n')

    processes = [start(project, name) for name in ("module", "other")]
    for process in processes:
        process.communicate(timeout=120)

    lines = (project / "outputs" / "mutants.jsonl").read_text().splitlines()
    assert sorted(json.loads(line)["killed"] for line in lines) == [False, False, True, True]


def test_tests_that_fail_without_a_mutant_are_an_error(project: Path):
    write(project, MODULE, TESTS + "\n\ndef test_nothing_is_true():\n    assert False\n")

    status, output = mutate(project)

    assert status == 1
    assert "expected the tests of module.py to pass without a mutant, got" in output
    assert "1 failed" in output


def test_a_part_that_is_in_no_path_is_refused(project: Path):
    status, output = mutate(project, "modul.py")

    assert status == 2
    assert "expected parts of module.py, got ['modul.py']" in output
