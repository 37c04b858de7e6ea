"""Mutation testing: whether a test fails when a module of `mutants.toml` is changed in one place.

cosmic-ray makes the mutants. Each runs its module's test files in a fork of a process that has imported the third-party
packages already: cosmic-ray's own runner starts an interpreter per mutant, which takes seconds with torch. No file is
changed. A mutant that fails a test, cannot be imported or runs past its limit is killed. One that only changes an
annotation is left out; one that `mutants.toml` calls equivalent is listed there with its reason.

    python tests/mutants.py [--minutes M] [--config FILE] [part of a module's path ...]
"""

import argparse
import ast
import difflib
import gc
import hashlib
import importlib
import io
import json
import math
import os
import resource
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import CodeType

import pytest
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator
from pydantic import BaseModel, ConfigDict
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

CONFIG = Path(__file__).with_name("mutants.toml")
VERDICTS = Path("outputs/mutants.jsonl")
"""A line for each mutant that ran: a run that was cut goes on from there while the module and its tests stay the same.
Lines are only added, so that runs beside each other lose none."""

_Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Module(BaseModel):
    """A module to mutate."""

    model_config = ConfigDict(extra="forbid")

    path: str
    """Like those of its tests, from the folder above that of `mutants.toml`."""
    tests: list[str]
    keywords: str = ""
    """pytest's `-k`, for tests that have no part in the module."""
    within: list[str] = []
    """Classes and functions to mutate, methods as `Class.method`; the whole module without any."""


class Equivalent(BaseModel):
    """A mutant that no test can kill."""

    model_config = ConfigDict(extra="forbid")

    path: str
    line: str
    mutant: str
    """The changed line, stripped; empty when it is removed."""
    reason: str


class Config(BaseModel):
    """`mutants.toml`."""

    model_config = ConfigDict(extra="forbid")

    score: float
    """Least percentage of mutants to be killed, of those that are not equivalent."""
    limit_factor: float
    """A mutant may take so many times as long as the unchanged module ..."""
    limit_extra_s: float
    """... and so many seconds more."""
    operators: list[str]
    modules: list[Module]
    equivalents: list[Equivalent] = []


@dataclass(frozen=True)
class Mutant:
    """One change of a module."""

    path: str
    place: int
    """Line, from 1."""
    line: str
    changed: str
    code: str

    def __str__(self) -> str:
        return f"{self.path}:{self.place}: {self.line or '(nothing)'}  ->  {self.changed or '(nothing)'}"


def mutants_of(path: str, operators: list[str], within: Sequence[str] = ()) -> Iterator[Mutant]:
    """Every different mutant of a module, or of the parts named, that changes more than annotations."""
    source = Path(path).read_text()
    tree, seen = get_ast(source), {_meaning(source)}
    lines = lines_of(path, source, within)
    for name in operators:
        operator = get_operator(f"core/{name}")()
        count = sum(1 for node in ast_nodes(tree) for _ in operator.mutation_positions(node))
        for occurrence in range(count):
            try:
                code = mutate_code(source, operator, occurrence)
                meaning = _meaning(code or source)
            except (AttributeError, SyntaxError):  # ExceptionReplacer on a dotted name
                continue
            if code is None or meaning in seen:
                continue
            seen.add(meaning)
            place, line, changed = _difference(source, code)
            if not within or place in lines:
                yield Mutant(path, place, line, changed, code)


def lines_of(path: str, source: str, within: Sequence[str]) -> set[int]:
    """Numbers of the lines of the classes and functions named, decorators included."""
    lines: set[int] = set()
    for name in within:
        node: ast.Module | _Named = ast.parse(source)
        for part in name.split("."):
            found = [child for child in node.body if isinstance(child, _Named) and child.name == part]
            if not found:
                raise ValueError(f"expected {name!r} (within) in {path}, got none of that name; correct mutants.toml")
            node = found[0]
        assert not isinstance(node, ast.Module)
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        lines.update(range(first, (node.end_lineno or first) + 1))
    return lines


def _meaning(code: str) -> str:
    """The syntax tree without annotations."""
    tree = ast.parse(code)
    for node in ast.walk(tree):
        if isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
    return ast.dump(tree)


def _difference(source: str, code: str) -> tuple[int, str, str]:
    """Number of the first line that differs, and the lines before and after the change."""
    before, after = source.splitlines(), code.splitlines()
    for _, start, end, new_start, new_end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        line, changed = _joined(before[start:end]), _joined(after[new_start:new_end])
        if before[start:end] != after[new_start:new_end]:
            return start + 1, line, changed
    raise ValueError("expected a mutant, got the unchanged module")


def _joined(lines: list[str]) -> str:
    return " ".join(line.strip() for line in lines)


@dataclass(frozen=True)
class Ran:
    """How one run of the tests ended."""

    passed: bool
    seconds: float
    output: str


def run_tests(module: Module, code: str | None, limit_s: float, modules_file: Path | None = None) -> Ran:
    """The module's tests in a fork, with `code` in the place of the module's own."""
    started = time.monotonic()
    with tempfile.TemporaryFile() as output:
        child = os.fork()
        if child == 0:
            os.setpgid(0, 0)
            seconds = math.ceil(limit_s) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))  # in case this process is killed
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            os._exit(_in_fork(module, code, modules_file))
        try:
            status = _wait(child, started + limit_s)
        except BaseException:  # such as Ctrl-C, which the child does not get
            _kill(child)
            raise
        output.seek(0)
        return Ran(status == 0, time.monotonic() - started, output.read().decode(errors="replace"))


def _wait(child: int, end: float) -> int | None:
    """The exit status, None for a child that had to be killed."""
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended or time.monotonic() > end:
            break
        time.sleep(0.005)
    if not ended:
        _kill(child)
        return None
    return os.waitstatus_to_exitcode(status)


def _kill(child: int) -> None:
    """With all that it started."""
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)


def _in_fork(module: Module, code: str | None, modules_file: Path | None) -> int:
    if code is not None:
        _replace(Path(module.path).resolve(), code)
    unused = (
        "cacheprovider",
        "schemathesis",
        "hypothesispytest",
        "xdist",
        "tests.optional_programs",
        "tests.record_durations",
    )
    own = [word for name in unused for word in ("-p", f"no:{name}")]
    ignored = ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
    keywords = ["-k", module.keywords] if module.keywords else []
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    status = int(pytest.main(["-x", "-q", "--tb=line", *own, *ignored, *keywords, *module.tests]))
    if modules_file is not None:
        modules_file.write_text(json.dumps(_third_party()))
    sys.stdout.flush()
    return status


def _replace(file: Path, code: str) -> None:
    """Import `file` as `code` from now on."""
    load = SourceFileLoader.get_code

    def get_code(self: SourceFileLoader, fullname: str) -> CodeType | None:
        if Path(self.path).resolve() == file:
            return compile(code, self.path, "exec", dont_inherit=True)
        return load(self, fullname)

    SourceFileLoader.get_code = get_code


def _third_party() -> list[str]:
    """Names of what was imported from installed packages."""
    files = {name: getattr(module, "__file__", None) or "" for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if "site-packages" in file and not name.startswith("trackway")]


def prepare(module: Module) -> Ran:
    """Run the unchanged module twice: the first run tells which packages this process imports for all that follow."""
    with tempfile.TemporaryDirectory() as folder:
        names = Path(folder) / "modules.json"
        first = run_tests(module, None, 600.0, names)
        if not first.passed:
            return first
        for name in json.loads(names.read_text()):
            try:
                importlib.import_module(name)
            except Exception:  # what only works inside a test run is imported there
                sys.modules.pop(name, None)
    gc.freeze()  # a collection in a fork would copy every page of these modules
    return run_tests(module, None, 600.0)


class Verdict(BaseModel):
    """How a mutant ended; a line of `VERDICTS`."""

    key: str
    killed: bool


class Verdicts:
    """Whether the mutants that ran were killed."""

    def __init__(self) -> None:
        lines = VERDICTS.read_text().splitlines() if VERDICTS.exists() else []
        self._killed = {verdict.key: verdict.killed for verdict in map(Verdict.model_validate_json, lines)}

    @staticmethod
    def key(module: Module, mutant: Mutant) -> str:
        """Of a mutant of the module as it is, under its tests as they are."""
        tests = "".join(Path(path).read_text() for path in module.tests)
        return f"{hash_of(mutant.code)}/{hash_of(tests + module.keywords)}"

    def get(self, key: str) -> bool | None:
        """Whether it was killed; None when it has not been run."""
        return self._killed.get(key)

    def put(self, key: str, killed: bool) -> None:
        """Keep a verdict, in one write at the end of the file."""
        self._killed[key] = killed
        VERDICTS.parent.mkdir(exist_ok=True)
        with VERDICTS.open("ab", buffering=0) as file:
            file.write(f"{Verdict(key=key, killed=killed).model_dump_json()}\n".encode())


def hash_of(text: str) -> str:
    """A short digest."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass
class Score:
    """Of one module."""

    path: str
    killed: int = 0
    survived: int = 0
    equivalent: int = 0
    left: int = 0

    @property
    def percent(self) -> float:
        """Killed, of those that ran and are not equivalent."""
        ran = self.killed + self.survived
        return 100.0 * self.killed / ran if ran else 100.0


def score(module: Module, config: Config, end: float) -> Score:
    """Run the module's mutants until the time is up, and print those that survive."""
    result, verdicts = Score(module.path), Verdicts()
    mutants = list(mutants_of(module.path, config.operators, module.within))
    equivalent = _equivalent(module, mutants, config)
    limit_s = 0.0
    with _progress() as progress:
        task = progress.add_task(module.path, total=len(mutants), survived=0)
        for mutant in mutants:
            progress.update(task, advance=1, survived=result.survived, refresh=True)
            if (mutant.line, mutant.changed) in equivalent:
                result.equivalent += 1
                continue
            key = verdicts.key(module, mutant)
            killed = verdicts.get(key)
            if killed is None and time.monotonic() > end:
                result.left += 1
                continue
            if killed is None:
                limit_s = limit_s or _limit_s(module, config)
                killed = not run_tests(module, mutant.code, limit_s).passed
                verdicts.put(key, killed)
            result.killed += killed
            result.survived += not killed
            if not killed:
                progress.console.print(f"survived: {mutant}", markup=False, highlight=False, soft_wrap=True)
    return result


def _progress() -> Progress:
    """Shown on a terminal only. No thread draws it, since the process forks; the tests' output is not redirected."""
    survived = TextColumn("{task.fields[survived]} survived")
    return Progress(
        *(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), survived, TimeRemainingColumn()),
        auto_refresh=False,
        transient=True,
        disable=not sys.stdout.isatty(),
        redirect_stdout=False,
        redirect_stderr=False,
    )


def _equivalent(module: Module, mutants: list[Mutant], config: Config) -> set[tuple[str, str]]:
    """Lines and their changes that no test can kill; raises ValueError for those that are no mutants of the module."""
    listed = {(entry.line, entry.mutant) for entry in config.equivalents if entry.path == module.path}
    for line, changed in listed - {(mutant.line, mutant.changed) for mutant in mutants}:
        raise ValueError(
            f"expected mutants of {module.path} under [[equivalents]], got {line!r} -> {changed!r}, which is none now; "
            "take it out of mutants.toml, or write it as the module does"
        )
    return listed


def _limit_s(module: Module, config: Config) -> float:
    unchanged = prepare(module)
    if not unchanged.passed:
        raise ValueError(f"expected the tests of {module.path} to pass without a mutant, got\n{unchanged.output}")
    return config.limit_factor * unchanged.seconds + config.limit_extra_s


def table(scores: list[Score]) -> str:
    """The scores as Markdown."""
    text = io.StringIO()
    print("| module | mutants | killed | survived | equivalent | not run | score |", file=text)
    print("|---|---|---|---|---|---|---|", file=text)
    total = Score("all")
    for module in scores:
        for name in ("killed", "survived", "equivalent", "left"):
            setattr(total, name, getattr(total, name) + getattr(module, name))
    for row in [*scores, total]:
        name = row.path.split("trackway/", 1)[-1]
        count = row.killed + row.survived + row.equivalent + row.left
        numbers = f"{count} | {row.killed} | {row.survived} | {row.equivalent} | {row.left} | {row.percent:.1f} %"
        print(f"| `{name}` | {numbers} |", file=text)
    return text.getvalue()


def main() -> int:
    """Exit status 1 when a module's score is too low, or not all of its mutants ran."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("parts", nargs="*", help="parts of the paths of the modules to mutate; all without any")
    words.add_argument("--minutes", type=float, default=1e9, help="end after so many minutes; the next run goes on")
    words.add_argument("--config", type=Path, default=CONFIG, help="another mutants.toml; its folder is that of tests")
    asked = words.parse_args()
    config = Config.model_validate(tomllib.loads(asked.config.read_text()))
    os.chdir(asked.config.resolve().parents[1])
    chosen = [
        module for module in config.modules if not asked.parts or any(part in module.path for part in asked.parts)
    ]
    if not chosen:
        words.error(f"expected parts of {', '.join(module.path for module in config.modules)}, got {asked.parts}")
    end = time.monotonic() + 60 * asked.minutes
    try:
        scores = [score(module, config, end) for module in chosen]
    except ValueError as error:
        sys.exit(str(error))
    print(table(scores))
    return int(any(module.left or module.percent < config.score for module in scores))


if __name__ == "__main__":
    sys.exit(main())
