"""User code: the settings that name it, the import of its modules and files, and functions of another process.

An import error becomes OwnCodeError, which names the setting, the error and the line of the user's file.
"""

import importlib
import importlib.util
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Generic, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, SecretStr, ValidationError, field_serializer

from trackway.serving.code_version import version_of
from trackway.serving.settings import ServiceSettings
from trackway.serving.stand_ins import offer_stand_ins
from trackway.serving.user_code import UserCodeExit, described, importing
from trackway.system import atomic_write, read_secret
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.health import OwnCode

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
    # A unique name: the file's name may be that of an installed module.
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
