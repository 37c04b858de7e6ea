"""Mutation testing: whether a test fails when a module of `mutants.toml` is changed in one place.

cosmic-ray makes the mutants. Each runs its module's test files in a fork of a process that has imported the third-party
packages already: cosmic-ray's own runner starts an interpreter per mutant, which takes seconds with torch. No file is
changed. A mutant that fails a test, cannot be imported or runs past its limit is killed. One that only changes an
annotation is left out; one that `mutants.toml` calls equivalent is listed there with its reason.

    python tests/mutants.py [--minutes M] [part of a module's path ...]
"""

import argparse
import ast
import difflib
import hashlib
import importlib
import io
import json
import os
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
from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
from cosmic_ray.plugins import get_operator  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel, ConfigDict

ROOT = Path(__file__).parents[1]
CONFIG = Path(__file__).with_name("mutants.toml")
STATE = ROOT / "outputs" / "mutants.json"
"""Verdicts by mutant: a run that was cut goes on from there as long as the module and its tests stay as they are."""

_Named = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


class Module(BaseModel):
    """A module to mutate."""

    model_config = ConfigDict(extra="forbid")

    path: str
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
    source = (ROOT / path).read_text()
    tree, seen = get_ast(source), {_meaning(source)}
    lines = _lines_of(path, source, within)
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


def _lines_of(path: str, source: str, within: Sequence[str]) -> set[int]:
    """Numbers of the lines of the classes and functions named, decorators included."""
    lines: set[int] = set()
    for name in within:
        node: ast.Module | _Named = ast.parse(source)
        for part in name.split("."):
            found = [child for child in node.body if isinstance(child, _Named) and child.name == part]
            if not found:
                raise ValueError(f"expected {name!r} (within) in {path}, got none of that name; mend mutants.toml")
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
            for descriptor in (1, 2):
                os.dup2(output.fileno(), descriptor)
            os._exit(_in_fork(module, code, modules_file))
        status = _wait(child, started + limit_s)
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
        os.killpg(child, signal.SIGKILL)
        os.waitpid(child, 0)
        return None
    return os.waitstatus_to_exitcode(status)


def _in_fork(module: Module, code: str | None, modules_file: Path | None) -> int:
    if code is not None:
        _replace(ROOT / module.path, code)
    own = ["-p", "no:cacheprovider", "-p", "no:schemathesis", "-p", "no:hypothesispytest", "-p", "no:xdist"]
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
        if Path(self.path).resolve() == file.resolve():
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
    return run_tests(module, None, 600.0)


class Verdicts:
    """Mutants that were killed or survived, kept over runs."""

    def __init__(self) -> None:
        self._known: dict[str, bool] = json.loads(STATE.read_text()) if STATE.exists() else {}

    @staticmethod
    def key(module: Module, mutant: Mutant) -> str:
        """Of a mutant of the module as it is, under its tests as they are."""
        tests = "".join((ROOT / path).read_text() for path in module.tests)
        return f"{hash_of(mutant.code)}/{hash_of(tests + module.keywords)}"

    def get(self, key: str) -> bool | None:
        """Whether it was killed; None when it has not been run."""
        return self._known.get(key)

    def put(self, key: str, killed: bool) -> None:
        """Keep a verdict."""
        self._known[key] = killed
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps(self._known))


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


def score(module: Module, config: Config, verdicts: Verdicts, end: float) -> Score:
    """Run the module's mutants until the time is up, and print those that survive."""
    result = Score(module.path)
    known = {(one.line, one.mutant) for one in config.equivalents if one.path == module.path}
    limit_s = 0.0
    for mutant in mutants_of(module.path, config.operators, module.within):
        if (mutant.line, mutant.changed) in known:
            result.equivalent += 1
            continue
        key = verdicts.key(module, mutant)
        killed = verdicts.get(key)
        if killed is None and time.monotonic() > end:
            result.left += 1
            continue
        if killed is None:
            if not limit_s:
                unchanged = prepare(module)
                if not unchanged.passed:
                    sys.exit(f"expected the tests of {module.path} to pass without a mutant, got\n{unchanged.output}")
                limit_s = config.limit_factor * unchanged.seconds + config.limit_extra_s
            killed = not run_tests(module, mutant.code, limit_s).passed
            verdicts.put(key, killed)
        result.killed += killed
        result.survived += not killed
        if not killed:
            print(f"survived: {mutant}", flush=True)
    return result


def table(scores: list[Score]) -> str:
    """The scores as Markdown."""
    text = io.StringIO()
    print("| module | mutants | killed | survived | equivalent | not run | score |", file=text)
    print("|---|---|---|---|---|---|---|", file=text)
    total = Score("all")
    for one in scores:
        for name in ("killed", "survived", "equivalent", "left"):
            setattr(total, name, getattr(total, name) + getattr(one, name))
    for one in [*scores, total]:
        name = one.path.split("trackway/", 1)[-1]
        count = one.killed + one.survived + one.equivalent + one.left
        numbers = f"{count} | {one.killed} | {one.survived} | {one.equivalent} | {one.left} | {one.percent:.1f} %"
        print(f"| `{name}` | {numbers} |", file=text)
    return text.getvalue()


def main() -> int:
    """Exit status 1 when a module's score is too low, or not all of its mutants ran."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("parts", nargs="*", help="parts of the paths of the modules to mutate; all without any")
    words.add_argument("--minutes", type=float, default=1e9, help="end after so many minutes; the next run goes on")
    asked = words.parse_args()
    config = Config.model_validate(tomllib.loads(CONFIG.read_text()))
    chosen = [one for one in config.modules if not asked.parts or any(part in one.path for part in asked.parts)]
    end = time.monotonic() + 60 * asked.minutes
    verdicts = Verdicts()
    scores = [score(module, config, verdicts, end) for module in chosen]
    print(table(scores))
    return int(any(one.left or one.percent < config.score for one in scores))


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(main())
