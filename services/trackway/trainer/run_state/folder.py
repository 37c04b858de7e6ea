"""A run on disk: `outputs/<run>/`, shared by the service and the run's process.

    config.json     the resolved configuration          state.json      the run's status (RunInfo)
    services.json   URLs of the services                metrics.jsonl   one MetricsRow per line
    worker.json     the process that owns the run       heartbeat.json  its newest beat
    worker.log      its output and traceback            checkpoints/    to resume from
    activity.json   waits and rollouts by state     trajectories/   step_<n>.parquet, val_step_<n>.parquet
    wandb/          W&B's local files                   tensorboard/    event files
    tools.json      the tools that its rollouts are offered
    token_values/   step_<n>.parquet                calls/          of a run that is driven by calls

Files are replaced as a whole, except `metrics.jsonl`, which is appended to. state.json has one writer at a time: the
run's process while it is alive, else the service. RUN_TRANSITIONS lists the allowed transitions.

A file may be damaged or of another version. A reader falls back to its last known value, then to RunState.UNREADABLE or
an error that says how to continue. An unreadable file is kept as `<name>.unreadable`.
"""

import logging
import os
import shutil
import socket
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import psutil
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import from_json

from trackway.system import LockTaken, acquire_lock, append_line, atomic_write, writing
from trackway.trainer.service_urls import ServiceUrls
from trackway.wire.base import RESERVED_NAMES
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Wait
from trackway.wire.trainer import ENDED, RUN_TRANSITIONS, MetricsRow, RunInfo, RunState

if TYPE_CHECKING:
    from trackway.run_config import RunConfig


_PROC = Path("/proc")


class Machine(BaseModel):
    """The scope of a pid. Two containers with the same host name have separate processes."""

    model_config = ConfigDict(frozen=True)

    host: str
    boot: str
    """The kernel's id of this boot, or its time where the kernel has no id."""
    processes: str
    """The kernel's name of the pid namespace. Empty where the kernel has none."""


class Owner(BaseModel):
    """A process, identified uniquely across machines. `worker.json` in the run's folder."""

    model_config = ConfigDict(frozen=True)

    machine: Machine
    pid: int
    started: int
    """When the process started, in clock ticks from the machine's boot or, without /proc, in milliseconds since 1970;
    pids are reused."""

    @classmethod
    def of(cls, pid: int, machine: Machine | None = None) -> Self:
        """A process of this machine."""
        return cls(machine=machine or this_machine(), pid=pid, started=_started(pid) or 0)

    @property
    def lives_here(self) -> bool:
        """Return whether the process is running; only for an owner on this machine."""
        return _started(self.pid) == self.started


class Beat(BaseModel):
    """A heartbeat of a process. `heartbeat.json` in the run's folder."""

    model_config = ConfigDict(frozen=True)

    owner: Owner
    """The process that wrote the beat. After losing the run it may write one more."""
    count: int
    """Increases every few seconds."""


@cache
def this_machine() -> Machine:
    """The machine that this process runs on."""
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
        processes = os.readlink(_PROC / "self/ns/pid")
    except FileNotFoundError:  # macOS has no id of a boot but its time, and one namespace of processes
        boot, processes = f"{psutil.boot_time():.0f}", ""
    return Machine(host=socket.gethostname(), boot=boot, processes=processes)


class OutputsLock:
    """Lock held briefly by the service that starts, resumes or marks a run; reentrant within a service."""

    def __init__(self, outputs: Path) -> None:
        self._outputs = outputs
        self._is_held = False

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock.

        Raises TrackwayError(CONFLICT) while another service holds it, StorageError when it cannot be written.
        """
        if self._is_held:
            yield
            return
        lock = self._outputs / ".runs.lock"
        with writing(lock, "the lock of the runs"):
            self._outputs.mkdir(parents=True, exist_ok=True)
            try:
                held = acquire_lock(lock, mode=None)
            except LockTaken:
                message = f"another trainer service is starting a run in {self._outputs}; try again"
                raise TrackwayError(ErrorCode.CONFLICT, message) from None
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
            held.release()


def _started(pid: int) -> int | None:
    """Start time of a process in clock ticks since boot. None when it does not exist or is a zombie.

    Without /proc, in milliseconds since 1970.
    """
    if not (_PROC / "self").exists():
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            return None if process.status() == psutil.STATUS_ZOMBIE else round(process.create_time() * 1000)
        return None
    try:
        fields = (_PROC / f"{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in "ZX" else int(fields[19])


Model = TypeVar("Model", bound=BaseModel)

STATE = "state.json"
OWNER = "worker.json"
METRICS = "metrics.jsonl"
ACTIVITY = "activity.json"
TOKEN_VALUES = "token_values"
_FINISHED = "finished"
TOOLS = "tools.json"
_TOOLS = TypeAdapter(list[ToolSchema])

logger = logging.getLogger("trackway.trainer")

EVALUATION_FILE = "evaluation.json"
"""File that only an evaluation's folder has."""


class Activity(BaseModel):
    """Work of a run's process at present."""

    waits: list[Wait] = Field(default_factory=list[Wait])
    rollouts: dict[str, int] = Field(default_factory=dict)
    """Rollouts by state. Empty before the first."""


@dataclass
class RunFolder:
    """Reads and writes the files of one run."""

    path: Path
    exit_if_lost: Callable[["RunFolder"], None] | None = field(default=None, repr=False, compare=False)
    """In the run's process: exits it unless it owns the run. Called before each change of the state and the rows."""
    _known: RunInfo | None = field(default=None, init=False, repr=False, compare=False)
    """The status that this object last read or wrote."""
    _known_owner: Owner | None = field(default=None, init=False, repr=False, compare=False)
    _state_is_damaged: bool = field(default=False, init=False, repr=False, compare=False)

    @property
    def name(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    @property
    def log(self) -> Path:
        """Output and traceback of the run's process."""
        return self.path / "worker.log"

    @property
    def metrics_file(self) -> Path:
        """One MetricsRow per line."""
        return self.path / METRICS

    @property
    def is_evaluation(self) -> bool:
        """Return whether `trackway evaluate` made the folder."""
        return (self.path / EVALUATION_FILE).is_file()

    @property
    def calls(self) -> Path:
        """Requests, results and models of a run that is driven by calls."""
        return self.path / "calls"

    @property
    def is_called(self) -> bool:
        """True if calls drive the run instead of the fit loop."""
        return self.calls.is_dir()

    @property
    def may_finish(self) -> bool:
        """True if a run that is driven by calls ends after the ones that it has."""
        return (self.calls / _FINISHED).exists()

    def let_finish(self) -> None:
        """End a run that is driven by calls after those that it has. Raises StorageError."""
        atomic_write(self.calls / _FINISHED, "")

    @property
    def exists(self) -> bool:
        """Return whether a run was ever started here, even if its state file is missing."""
        if os.path.lexists(self.path / STATE):
            return True
        with suppress(OSError):
            return self.metrics_file.is_file() or any(self.checkpoints.iterdir())
        return False

    def create(self, config: "RunConfig", services: ServiceUrls, total_steps: int = 0) -> RunInfo:
        """Write a new run's files, with this process as its owner.

        Raises TrackwayError(CONFLICT) when the name is taken, and StorageError when the files cannot be written. A
        folder that was created here is then removed.
        """
        if self.exists:
            message = f"run {self.name!r} exists; resume it, or start under another name"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=self.name)
        existed = self.path.exists()
        try:
            with writing(self.path, f"run {self.name!r}"):
                self.path.mkdir(parents=True, exist_ok=True)
                self._make_checkpoints(config.trainer.default_local_dir)
            self.write_config(config)
            self.write_services(services)
            self.write_owner(Owner.of(os.getpid()))
            info = RunInfo(
                run=self.name,
                uid=uuid.uuid4().hex,
                state=RunState.STARTING,
                total_steps=total_steps,
                folder=str(self.path.resolve()),
            )
            return self._write(info)
        except (OSError, TrackwayError):
            if not existed:
                shutil.rmtree(self.path, ignore_errors=True)
            raise

    def _make_checkpoints(self, elsewhere: str | None) -> None:
        """The folder of the checkpoints, a link where they lie elsewhere."""
        if elsewhere is None:
            self.checkpoints.mkdir(exist_ok=True)
            return
        target = Path(elsewhere).expanduser().absolute()
        target.mkdir(parents=True, exist_ok=True)
        newest = max(target.glob("global_step_*"), key=os.path.getmtime, default=None)
        if newest is not None:
            message = (
                f"trainer.default_local_dir: expected a folder without checkpoints for the new run {self.name!r}, got "
                f"{target} with {newest.name}; take another, and to begin at one of these add "
                f"trainer.resume_mode=resume_path trainer.resume_from_path={newest}"
            )
            raise TrackwayError(ErrorCode.CONFLICT, message, run=self.name)
        self.checkpoints.unlink(missing_ok=True)
        self.checkpoints.symlink_to(target, target_is_directory=True)

    def config(self) -> "RunConfig":
        """The resolved configuration. Raises TrackwayError(CONFLICT) when it cannot be read."""
        from trackway.run_config import RunConfig  # needs Hydra, which a reader of runs may lack

        return self._required("config.json", RunConfig)

    def write_config(self, config: "RunConfig") -> None:
        """Replace the configuration."""
        self._replace("config.json", config.model_dump_json(indent=2))

    def services(self) -> ServiceUrls:
        """URLs of the services around the run. Raises TrackwayError(CONFLICT) when they cannot be read."""
        return self._required("services.json", ServiceUrls)

    def write_services(self, services: ServiceUrls) -> None:
        """Replace the URLs, which may have changed since the run's first start."""
        self._replace("services.json", services.model_dump_json(indent=2))

    def tools(self) -> list[ToolSchema]:
        """Return the tools that the run's rollouts are offered. Empty when they are not recorded."""
        try:
            return _TOOLS.validate_json((self.path / TOOLS).read_bytes())
        except (OSError, ValidationError):
            return []

    def write_tools(self, offered: Iterable[ToolSchema]) -> None:
        """Record the offered tools that the run may use (`trackway.tools`)."""
        names = self.config().trackway.tools
        tools = [tool for tool in offered if names is None or tool.function.name in names]
        self._replace(TOOLS, _TOOLS.dump_json(tools).decode())

    def info(self) -> RunInfo:
        """The run's status.

        When state.json cannot be read: the status that this object last read or wrote, else UNREADABLE with the fields
        that can be read and a message that says how to continue. The run's process, which is about to write the file
        again, takes it for STARTING.
        """
        path = self.path / STATE
        try:
            info = RunInfo.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            self._state_is_damaged = not isinstance(error, FileNotFoundError)
            return self._known or self._unreadable(error)
        self._state_is_damaged = False
        self._known = info if info.run == self.name else info.model_copy(update={"run": self.name})
        return self._known

    def move(self, state: RunState, message: str = "", **changes: object) -> RunInfo:
        """Enter a state and change other fields with it. CONFLICT when RUN_TRANSITIONS does not allow it."""
        info = self.info()
        if state not in RUN_TRANSITIONS[info.state]:
            allowed = ", ".join(sorted(RUN_TRANSITIONS[info.state])) or "nothing, start a new run"
            text = f"run {self.name!r} is {info.state}: expected {allowed} next, got {state}"
            raise TrackwayError(ErrorCode.CONFLICT, text, run=self.name)
        return self._write(info.model_copy(update={**changes, "state": state, "message": message}))

    def update(self, **changes: object) -> RunInfo:
        """Change fields other than `state`, which `move` changes."""
        assert "state" not in changes, "move() changes the state"
        return self._write(self.info().model_copy(update=changes))

    def append_row(self, row: MetricsRow) -> None:
        """Add the metrics of a step."""
        self._require_ownership()
        append_line(self.metrics_file, row.model_dump_json(), what=f"the metrics of step {row.step}")

    def rows(self) -> list[MetricsRow]:
        """The rows, without a truncated last line and without unreadable lines."""
        return self._rows()[0]

    def _rows(self) -> tuple[list[MetricsRow], int]:
        """The rows, and the number of unreadable lines."""
        if not self.metrics_file.is_file():
            return [], 0
        lines = self.metrics_file.read_bytes().split(b"\n")[:-1]
        rows = parse_rows(lines)
        return rows, len(lines) - len(rows)

    def rewind(self, row: MetricsRow | None) -> None:
        """Remove the rows after `row`, the newest row of a checkpoint; None removes all rows.

        A missing `row` with data is added, because a checkpoint is written before the row of its step.
        """
        self._require_ownership()
        rows, damaged = self._rows()
        if damaged:
            logger.warning("%s: %d lines cannot be read; it is kept as %s", METRICS, damaged, _aside(METRICS))
            self._set_aside(METRICS)
        kept = [] if row is None else [old for old in rows if old.step <= row.step]
        if row is not None and row.data and all(old.step != row.step for old in kept):
            kept.append(row)
        self._replace(METRICS, "".join(kept_row.model_dump_json() + "\n" for kept_row in kept))

    def write_owner(self, owner: Owner) -> None:
        """Record the process that owns the run."""
        self._replace(OWNER, owner.model_dump_json())
        self._known_owner = owner

    def owner(self) -> Owner | None:
        """The process that owns the run, or owned it last, or None before the first.

        When worker.json cannot be read: the owner that this object last read or wrote, else that of the newest beat.
        """
        try:
            self._known_owner = Owner.model_validate_json((self.path / OWNER).read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValidationError):
            beat = self._beat()
            return self._known_owner or (beat.owner if beat else None)
        return self._known_owner

    def write_beat(self, beat: Beat) -> None:
        """Write a process's beat. This does not change the owner."""
        self._replace("heartbeat.json", beat.model_dump_json())

    def beats(self, owner: Owner) -> int:
        """The count of the newest beat of a process. 0 before its first beat."""
        beat = self._beat()
        return beat.count if beat is not None and beat.owner == owner else 0

    def _beat(self) -> Beat | None:
        """The newest beat, or None before the first one and when it cannot be read."""
        try:
            return Beat.model_validate_json((self.path / "heartbeat.json").read_bytes())
        except (OSError, ValidationError):
            return None

    def write_activity(self, activity: Activity) -> None:
        """Replace what the run's process does."""
        self._replace(ACTIVITY, activity.model_dump_json())

    def activity(self) -> Activity:
        """Work of the run's process. Empty when the file cannot be read."""
        with suppress(OSError, ValidationError):
            return Activity.model_validate_json((self.path / ACTIVITY).read_bytes())
        return Activity()

    def disown(self) -> None:
        """Remove the owner. A process that still runs as the owner notices and exits."""
        (self.path / "worker.json").unlink(missing_ok=True)

    def ended(self) -> bool:
        """Return whether the run has ended, so that nothing more is written."""
        return self.info().state in ENDED - {RunState.UNREADABLE}

    def _required(self, name: str, model: type[Model]) -> Model:
        path = self.path / name
        try:
            return model.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            message = (
                f"expected {name} of run {self.name!r} at {path}, got a file that cannot be read ({_reason(error)}); "
                "repair it, or start a new run from this run's newest checkpoint: trainer.resume_mode=resume_path "
                f"trainer.resume_from_path={self.checkpoints}/global_step_<n>"
            )
            raise TrackwayError(ErrorCode.CONFLICT, message, run=self.name) from error

    def _require_ownership(self) -> None:
        if self.exit_if_lost is not None:
            self.exit_if_lost(self)

    def _unreadable(self, error: OSError | ValidationError) -> RunInfo:
        info = _unreadable(self.path / STATE, error)
        if self.exit_if_lost is None:
            return info
        return info.model_copy(update={"state": RunState.STARTING, "message": ""})

    def _write(self, info: RunInfo) -> RunInfo:
        self._require_ownership()
        if self._state_is_damaged:
            self._set_aside(STATE)
        self._replace(STATE, info.model_dump_json(indent=2))
        self._known, self._state_is_damaged = info, False
        return info

    def _set_aside(self, name: str) -> None:
        aside = self.path / _aside(name)
        if aside.is_dir():
            shutil.rmtree(aside)
        with suppress(FileNotFoundError):
            (self.path / name).replace(aside)

    def _replace(self, name: str, text: str) -> None:
        atomic_write(self.path / name, text, what=f"{name} of run {self.name!r}")


def parse_rows(lines: Iterable[bytes]) -> list[MetricsRow]:
    """The rows of lines of metrics.jsonl, without those that cannot be read."""
    rows: list[MetricsRow] = []
    for line in lines:
        with suppress(ValidationError):
            rows.append(MetricsRow.model_validate_json(line))
    return rows


def run_folders(outputs: Path) -> list[RunFolder]:
    """The runs directly in an outputs folder, by name."""
    return [RunFolder(folder) for folder in _subfolders(outputs) if RunFolder(folder).exists]


def outputs_folders(outputs: Path) -> list[Path]:
    """The outputs folder itself, and those directly in it, such as `outputs/demo`."""
    return [outputs, *(folder for folder in _subfolders(outputs) if not RunFolder(folder).exists)]


def _subfolders(outputs: Path) -> list[Path]:
    if not outputs.is_dir():
        return []
    return sorted(path for path in outputs.iterdir() if path.is_dir() and path.name not in RESERVED_NAMES)


def _aside(name: str) -> str:
    return f"{name}.unreadable"


def _unreadable(path: Path, error: OSError | ValidationError) -> RunInfo:
    """The status of a run whose state file cannot be read, with each field that is present and valid by itself."""
    name = path.parent.name
    message = (
        f"{path} cannot be read ({_reason(error)}); resume the run: it continues from its newest checkpoint, or from "
        f"the model without one, and the file is kept as {_aside(path.name)}"
    )
    required = {"run": name, "state": RunState.UNREADABLE, "message": message}
    kept = {"folder": str(path.parent.resolve())}
    for key, value in _fields(path).items():
        if key in RunInfo.model_fields and key not in (*required, "interrupted"):
            with suppress(ValidationError):
                RunInfo.model_validate({**required, key: value})
                kept[key] = value
    return RunInfo.model_validate({**kept, **required})


def _fields(path: Path) -> dict[str, Any]:
    """The fields of a JSON object that may be truncated."""
    try:
        tree = from_json(path.read_bytes(), allow_partial=True)
    except (OSError, ValueError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _reason(error: OSError | ValidationError) -> str:
    if isinstance(error, OSError):
        return error.strerror or type(error).__name__
    first = error.errors(include_url=False, include_input=False)[0]
    where = "".join(f"{part}: " for part in first["loc"])
    return f"{where}{first['msg']}"[:200]
