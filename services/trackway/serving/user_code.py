"""User code (tools, scorers, agent loops, their modules): its settings, version and import, and handling its errors.

An exception fails only its own call. SystemExit and KeyboardInterrupt propagate through asyncio's event loop and end
the server; `except Exception` catches neither them nor other BaseExceptions. Code that ends the process without raising
is not contained: `os._exit`, a signal to itself, `loop.stop()`.

An import error becomes OwnCodeError, which names the setting, the error and the line of the user's file.

Without an installed verl, imports of its modules get stand-ins: `from verl.tools.base_tool import BaseTool` gives our
class of that interface.
"""

import asyncio
import hashlib
import importlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
import time
import traceback
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import Context, ContextVar, copy_context
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, Generic, Self, TypeVar, cast

import anyio
import anyio.to_thread
from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer

from trackway.serving.settings import ServiceSettings
from trackway.system import atomic_write, read_secret
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import OwnCode

T = TypeVar("T")

Steps = Coroutine[Any, Any, T] | Generator[Any, Any, T]

_inside: ContextVar[bool] = ContextVar("trackway_user_code", default=False)
_LIBRARIES = {sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")}
_NOT_OWN = tuple(f"{folder}{os.sep}" for folder in (*sys.modules["trackway"].__path__, *_LIBRARIES))
"""Folders of code that is not the user's."""
_LEAVE_THE_LOOP = (SystemExit, KeyboardInterrupt)


class UserCodeExit(RuntimeError):
    """User code called `sys.exit`, or raised something that is not an Exception."""


def failure_of(error: BaseException) -> Exception:
    """The error as an Exception: itself, or a UserCodeExit that describes it."""
    if isinstance(error, Exception):
        return error
    if isinstance(error, SystemExit):
        return UserCodeExit(f"it called sys.exit({'' if error.code is None else repr(error.code)})")
    if isinstance(error, asyncio.CancelledError):
        return UserCodeExit("it cancelled itself")
    return UserCodeExit(f"it raised {described(error)}, which is not an Exception")


def described(error: BaseException) -> str:
    """Type and message; for a UserCodeExit only the message. Never raises, even if the type's `__str__` does."""
    try:
        message = str(error)
    except BaseException:
        message = "(its message cannot be read: __str__ raised)"
    if isinstance(error, UserCodeExit):
        return message
    return f"{type(error).__name__}: {message}" if message else type(error).__name__


def raised_at(error: BaseException) -> str | None:
    """Return `file:line` of the user's code that raised the error, with a hint, or None if no such code did."""
    files = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f"{file}:{line}" for file, line in files if not file.startswith((*_NOT_OWN, "<"))]
    hint = ": is an `await` missing?" if isinstance(error, AttributeError) and "'coroutine'" in str(error) else ""
    return None if isinstance(error, UserCodeExit) or not own else f"{own[-1]}{hint}"


def located(error: BaseException) -> str:
    """Return type and message, with the file and line of the user's code that raised it, if any did."""
    place = raised_at(error)
    return f"{described(error)} ({place})" if place else described(error)


@contextmanager
def user_code(what: str) -> Iterator[None]:
    """Wrap a synchronous call: anything raised that is not an Exception becomes UserCodeExit, prefixed with `what`."""
    try:
        yield
    except Exception:
        raise
    except BaseException as error:
        raise UserCodeExit(f"{what}: {described(failure_of(error))}") from error


@contextmanager
def importing(what: str) -> Iterator[None]:
    """Wrap the import of a user's module: an exit becomes UserCodeExit with the remedy."""
    with user_code(what):
        try:
            yield
        except SystemExit as error:
            remedy = "put what must not run on import under `if __name__ == '__main__'`"
            raise UserCodeExit(f"{what}: {described(failure_of(error))} on import; {remedy}") from error


async def contained(awaitable: Awaitable[T]) -> T:
    """The awaitable's result, in its own task: exceptions that would leave the event loop become UserCodeExit."""
    _inside.set(True)
    try:
        return await awaitable
    except _LEAVE_THE_LOOP as error:
        raise failure_of(error) from error


async def run_user_code(call: Callable[[], Awaitable[T]]) -> T:
    """The result of `call`, in its own task, which is cancelled with its caller.

    Raises the code's error as an Exception. A CancelledError that the code itself raised becomes UserCodeExit.
    """

    async def run() -> T:
        return await contained(call())

    work = asyncio.create_task(run())
    cancellation: asyncio.CancelledError | None = None
    try:
        await asyncio.wait({work})
    except asyncio.CancelledError as error:
        cancellation = error
        work.cancel(*error.args)
        await asyncio.wait({work})
    if cancellation is not None and (work.cancelled() or work.exception() is None):
        raise cancellation
    return outcome_of(work)


def outcome_of(work: asyncio.Task[T]) -> T:
    """The result of a finished task of user code. Its error is raised as an Exception."""
    if work.cancelled():
        raise failure_of(asyncio.CancelledError())
    error = work.exception()
    if error is not None and not isinstance(error, Exception):
        raise failure_of(error) from error
    return work.result()


def own_context() -> Context:
    """A copy of the context in which tasks are the service's own, also if user code runs in this one."""
    context = copy_context()
    context.run(_inside.set, False)
    return context


class ContainedTasks:
    """A task factory that also contains tasks made by user code (`gather`, `wait_for`, `create_task`)."""

    def __init__(self, factory: Callable[..., asyncio.Future[Any]] | None) -> None:
        self._make = factory or _task

    def __call__(
        self, loop: asyncio.AbstractEventLoop, coro: Steps[T], context: Context | None = None, **options: Any
    ) -> asyncio.Future[T]:
        if context is not None:
            options["context"] = context
        if not (_inside.get() if context is None else context.get(_inside, False)):
            return self._make(loop, coro, **options)
        task = self._make(loop, contained(_awaitable(coro)), **options)
        task.add_done_callback(lambda _: coro.close())  # a task cancelled before its start awaits nothing
        return task


def contain_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Prevent tasks of user code from ending this loop; idempotent."""
    factory = loop.get_task_factory()
    if not isinstance(factory, ContainedTasks):
        loop.set_task_factory(ContainedTasks(factory))


def _task(loop: asyncio.AbstractEventLoop, coro: Steps[T], **options: Any) -> asyncio.Task[T]:
    return asyncio.Task(coro, loop=loop, **options)


@types.coroutine
def _awaitable(coro: Steps[T]) -> Generator[Any, Any, T]:
    return (yield from cast("Generator[Any, Any, T]", coro))  # a coroutine allows it in here


async def in_thread(call: Callable[[], T], limiter: anyio.CapacityLimiter | None = None) -> T:
    """The result of `call`, which runs in a thread. UserCodeExit when it calls `sys.exit` or raises no Exception.

    Waits for the thread even when cancelled: a thread cannot be stopped, and while it runs, a tool's instance must not
    get another call.
    """

    def contained() -> T:
        try:
            return call()
        except Exception:
            raise
        except BaseException as error:  # SystemExit would leave the event loop from the task below
            raise failure_of(error) from error

    work = asyncio.create_task(anyio.to_thread.run_sync(contained, limiter=limiter))
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work})
        raise


_GIT_S = 5.0
"""Longest wait for git."""


def version_of(modules: Sequence[str], code_path: Path | None, files: Iterable[Path]) -> OwnCode | None:
    """The version of these modules, with all of their top-level packages, and of these files. None when there are none.

    A missing file is left out; loading it reports the error.
    """
    sources = {path: path.relative_to(root.parent) for root in roots_of(modules, code_path) for path in _python(root)}
    sources |= {path: Path(path.name) for path in files if path.is_file()}
    if not sources:
        return None
    digest = hashlib.sha256()
    for path, name in sorted(sources.items(), key=lambda source: str(source[1])):
        content = path.read_bytes()
        digest.update(f"{name} {len(content)}\n".encode())
        digest.update(content)
    folder = code_path or next(iter(sources)).parent
    named = sorted(str(name) for name in sources.values())
    return OwnCode(digest=digest.hexdigest()[:16], commit=_commit(folder), modules=[*modules], files=named[:100])


def roots_of(modules: Sequence[str], code_path: Path | None) -> list[Path]:
    """The package folder or the file of the top-level package of each module that can be found."""
    return [root for name in sorted({name.partition(".")[0] for name in modules}) if (root := _root(name, code_path))]


def _root(name: str, code_path: Path | None) -> Path | None:
    if code_path is not None:
        for candidate in (code_path / name, code_path / f"{name}.py"):
            if candidate.exists():
                return candidate
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    origin = Path(spec.origin)
    return origin.parent if origin.name == "__init__.py" else origin


def _python(root: Path) -> list[Path]:
    return [path for path in root.rglob("*.py") if path.is_file()] if root.is_dir() else [root]


def _commit(folder: Path) -> str:
    """The commit of the folder's git repository, with `+changes` when it has some. Empty without git."""
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}+changes" if _git(folder, "status", "--porcelain", "--", ".") else commit
    except (OSError, subprocess.SubprocessError):
        return ""


def _git(folder: Path, *words: str) -> str:
    command = ["git", "-C", str(folder), *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_GIT_S, check=True)
    return done.stdout.strip()


STAND_INS = {
    "verl.experimental.agent_loop": "trackway.agent.verl_interface",
    "verl.experimental.agent_loop.agent_loop": "trackway.agent.verl_interface",
    "verl.experimental.agent_loop.tool_parser": "trackway.agent.verl_interface",
    "verl.tools.base_tool": "trackway.tools.verl_interface",
    "verl.tools.function_tool": "trackway.tools",
    "verl.tools.schemas": "trackway.tools.verl_interface",
    "verl.utils.profiler": "trackway.agent.verl_interface",
    "verl.utils.rollout_trace": "trackway.tracing",
    "verl.workers.rollout.llm_server": "trackway.agent.verl_interface",
    "verl.workers.rollout.replica": "trackway.agent.verl_interface",
}
"""Module of verl -> the module that has its names here."""

_MARK = "__trackway_stand_in__"


def offer_stand_ins() -> None:
    """Make the stand-ins importable; idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last, so that an installed verl is found first


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        is_package = any(name.startswith(f"{fullname}.") for name in STAND_INS)
        if not (is_package or fullname in STAND_INS) or (parent is not None and not hasattr(parent, _MARK)):
            return None
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _MARK, True)
        ours = STAND_INS.get(module.__name__)
        if ours is not None:
            source = importlib.import_module(ours)
            names = {name for name in vars(source) if not name.startswith("__")}
            names |= {*getattr(source, "__all__", ())}  # a package may import its names at first use
            vars(module).update({name: getattr(source, name) for name in names})


P = TypeVar("P")

OUTAGE_S = 60.0
"""Longest wait for a process that serves functions, from its first missing answer."""
ASK_AGAIN_S = 1.0
"""Pause between two attempts to reach it."""


class OwnCodeSettings(ServiceSettings):
    """Settings of a service that runs a user's own code."""

    code_path: Path | None = None
    """Folder prepended to the Python path of this service, where `modules` are found."""
    modules: list[str] = Field(default_factory=list)
    """Python modules to import at start-up. Agent loops with `@register`, functions with `@function_tool` and scorers
    with `@scorer` that they define, or that modules below them define, are served."""

    code_version: str = ""
    """Any text, such as a digest of the code: Ray Serve restarts the replicas when it changes."""

    @property
    def own_files(self) -> list[Path]:
        """Files of own code that the settings name."""
        return []

    def version(self) -> OwnCode | None:
        """The version of the own code that the settings name, from its files as they are now, or None without any."""
        return version_of(self.modules, self.code_path, self.own_files)


class OwnCodeError(ValueError):
    """A user's module or file cannot be loaded."""


def import_modules(names: Sequence[str], code_path: Path | None = None) -> None:
    """Import the modules of a project. Raises OwnCodeError with the error and its line if one cannot be imported."""
    add_to_path(code_path)
    offer_stand_ins()
    for name in names:
        with loading(f"setting modules, {name!r}"):
            importlib.import_module(name)


def add_to_path(folder: Path | None) -> None:
    """Prepend a folder to the Python path, once. Raises OwnCodeError if there is no such folder."""
    if folder is None:
        return
    if not folder.is_dir():
        raise OwnCodeError(f"setting code_path: expected a folder, got {str(folder)!r}; correct the path")
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()


def module_of_file(path: Path, setting: str) -> ModuleType:
    """The module of a Python file, executed on every call.

    Raises FileNotFoundError, or OwnCodeError with the error and its line if it cannot be imported.
    """
    if not path.is_file():
        raise FileNotFoundError(f"{setting}: expected a Python file, got {str(path)!r}; correct the path")
    # A unique name, since an installed module may have the file's name.
    name = f"trackway_own_{path.stem}_{abs(hash(path.resolve())):x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{setting}: expected a Python file (.py), got {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    offer_stand_ins()
    with loading(f"{setting} {str(path)!r}"):
        spec.loader.exec_module(module)
    return module


@contextmanager
def loading(what: str) -> Iterator[None]:
    """Wrap an import: its errors become OwnCodeError with the module, the error, and the line of the user's file."""
    try:
        with importing(what):
            yield
    except UserCodeExit:
        raise
    except Exception as error:
        raise OwnCodeError(f"{what}: {described(error)}{_place(error)}") from error


class FunctionServer(BaseModel):
    """A process that serves functions: tools at `/tools/mcp`, a scorer at `/reward`. Its file is for this machine."""

    model_config = ConfigDict(extra="forbid")

    url: str
    token: SecretStr
    process: str
    """The process in words, for messages: `process 4711 on host`."""
    has_tools: bool
    has_reward: bool

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the file. Raises ValueError, with the remedy, if it is missing or not readable."""
        try:
            return cls.model_validate_json(read_secret(path, "functions_file"))
        except (OSError, ValidationError) as error:
            raise ValueError(
                f"functions_file: expected the file of a process that serves functions, got {path} "
                f"({type(error).__name__}); start the run from Python with its functions: tools=..., reward=..."
            ) from error

    def write(self, path: Path) -> None:
        """Write the file with access for its owner only."""
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic_write(path, self.model_dump_json(), what="the address of functions", mode=0o600)

    @field_serializer("token")
    def _shown(self, token: SecretStr) -> str:
        return token.get_secret_value()


@dataclass
class FunctionsOutage:
    """The time for which a process that serves functions does not answer."""

    process: str
    """The process in words, as in FunctionServer."""
    began: float | None = None
    """Time of the first missing answer on the monotonic clock, or None while the process answers."""

    def error(self, got: Exception) -> TrackwayError:
        """Return UNAVAILABLE for a call without answer. It asks for a retry until the outage has lasted `OUTAGE_S`."""
        now = time.monotonic()
        if self.began is None:
            self.began = now
        left_s = self.began + OUTAGE_S - now
        if left_s > 0:
            message = f"waiting for the functions of {self.process}, {left_s:.0f} s more"
            return TrackwayError(ErrorCode.UNAVAILABLE, message, retry_after_s=ASK_AGAIN_S)
        message = (
            f"expected an answer from the functions of {self.process} within {OUTAGE_S:g} s, got none ({got}); start "
            "the run there again, which resumes it"
        )
        return TrackwayError(ErrorCode.UNAVAILABLE, message)


class Declared(Generic[P]):
    """Registry of decorated functions or classes, by module and name. A later import replaces them."""

    def __init__(self) -> None:
        self._parts: dict[tuple[str, str], P] = {}

    def add(self, definition: Callable[..., object], part: P) -> None:
        """Register the part defined by this function or class."""
        self._parts[definition.__module__, definition.__qualname__] = part

    def within(self, modules: Sequence[str]) -> list[P]:
        """The parts defined in these modules or their submodules, in the order of their definition."""
        return [
            part
            for (module, _), part in self._parts.items()
            if any(module == name or module.startswith(f"{name}.") for name in modules)
        ]


def _place(error: BaseException) -> str:
    """The file and line of an import error: the syntax error's own, else the innermost frame outside this package."""
    if isinstance(error, SyntaxError):
        return ""  # its message has both
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith("<frozen")]
    outside = [frame for frame in frames if frame.filename != __file__ and frame.filename != importlib.__file__]
    return f" ({outside[-1].filename}:{outside[-1].lineno})" if outside else ""


def own_function(key: str, name: str) -> Callable[..., object]:
    """The function that `name`, `module:function`, stands for.

    Raises ValueError naming `key` when the module cannot be imported or has no such function.
    """
    module_name, _, function_name = name.partition(":")
    with loading(f"{key}={name}"):
        module = importlib.import_module(module_name)
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ValueError(f"{key}: expected a function {function_name!r} in {module_name}, found none; correct the name")
    return function
