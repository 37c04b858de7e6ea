"""A run on disk: `outputs/<run>/`, the one place where the service and the run's own process meet.

    config.json     the resolved configuration          state.json      where it stands (RunInfo)
    services.json   URLs of the services                metrics.jsonl   one MetricsRow per line
    worker.json     the process that has the run        heartbeat.json  its newest sign of life
    worker.log      its output and traceback            checkpoints/    to resume from
    trajectories/   step_<n>.parquet, val_step_<n>.parquet
    wandb/          what W&B keeps here                 tensorboard/    event files

Every file is replaced whole (`metrics.jsonl` is appended to). state.json has one writer at a time: the run's process
while it lives, else the service. RUN_TRANSITIONS says which state may follow which.
"""

import os
import socket
import uuid
from dataclasses import dataclass
from pathlib import Path

from trackway.trainer.config import RunConfig
from trackway.trainer.owner import Beat, Owner
from trackway.trainer.settings import ServiceUrls
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trainer import ENDED, RUN_TRANSITIONS, MetricsRow, RunInfo, RunState


@dataclass(frozen=True)
class RunFolder:
    """Reads and writes the files of one run."""

    path: Path

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
        return self.path / "metrics.jsonl"

    @property
    def exists(self) -> bool:
        """Whether a run was ever started here."""
        return (self.path / "state.json").is_file()

    def create(self, config: RunConfig, services: ServiceUrls, total_steps: int = 0) -> RunInfo:
        """Write a new run's files; it is this process's. Raises TrackwayError(CONFLICT) when the name is taken."""
        if self.exists:
            message = f"run {self.name!r} exists; resume it, or start under another name"
            raise TrackwayError(ErrorCode.CONFLICT, message, run=self.name)
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        self._replace("config.json", config.model_dump_json(indent=2))
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

    def config(self) -> RunConfig:
        """The resolved configuration."""
        return RunConfig.model_validate_json(self._read("config.json"))

    def services(self) -> ServiceUrls:
        """URLs of the services around the run."""
        return ServiceUrls.model_validate_json(self._read("services.json"))

    def write_services(self, services: ServiceUrls) -> None:
        """Replace the URLs: they may have changed since the run was started first."""
        self._replace("services.json", services.model_dump_json(indent=2))

    def info(self) -> RunInfo:
        """Where the run stands."""
        return RunInfo.model_validate_json(self._read("state.json"))

    def move(self, state: RunState, message: str = "", **changes: object) -> RunInfo:
        """Enter a state and change fields with it. CONFLICT when RUN_TRANSITIONS does not allow it."""
        info = self.info()
        if state not in RUN_TRANSITIONS[info.state]:
            allowed = ", ".join(sorted(RUN_TRANSITIONS[info.state])) or "nothing, start a new run"
            text = f"run {self.name!r} is {info.state}: expected {allowed} next, got {state}"
            raise TrackwayError(ErrorCode.CONFLICT, text, run=self.name)
        return self._write(info.model_copy(update={**changes, "state": state, "message": message}))

    def update(self, **changes: object) -> RunInfo:
        """Change fields of the state other than `state` itself, which `move` changes."""
        assert "state" not in changes, "move() changes the state"
        return self._write(self.info().model_copy(update=changes))

    def append_row(self, row: MetricsRow) -> None:
        """Add the metrics of a step."""
        with self.metrics_file.open("a") as file:
            file.write(row.model_dump_json() + "\n")

    def rows(self) -> list[MetricsRow]:
        """Every row; a last line that is cut off is left out."""
        if not self.metrics_file.is_file():
            return []
        lines = self.metrics_file.read_text().split("\n")[:-1]
        return [MetricsRow.model_validate_json(line) for line in lines]

    def rewind(self, row: MetricsRow | None) -> None:
        """Make `row`, the newest one of a checkpoint, the last one; None removes all rows.

        A row that was lost is added, if it says anything: a checkpoint is written before its step's row.
        """
        kept = [] if row is None else [old for old in self.rows() if old.step <= row.step]
        if row is not None and row.data and all(old.step != row.step for old in kept):
            kept.append(row)
        self._replace("metrics.jsonl", "".join(one.model_dump_json() + "\n" for one in kept))

    def write_owner(self, owner: Owner) -> None:
        """Say which process has the run."""
        self._replace("worker.json", owner.model_dump_json())

    def owner(self) -> Owner | None:
        """The process that has the run, or had it last."""
        try:
            return Owner.model_validate_json(self._read("worker.json"))
        except FileNotFoundError:
            return None

    def write_beat(self, beat: Beat) -> None:
        """Say that a process lives; whose run this is stays as it is."""
        self._replace("heartbeat.json", beat.model_dump_json())

    def beats(self, owner: Owner) -> int:
        """The newest beat of this process; 0 before the first one."""
        try:
            beat = Beat.model_validate_json(self._read("heartbeat.json"))
        except FileNotFoundError:
            return 0
        return beat.count if beat.owner == owner else 0

    def disown(self) -> None:
        """Nobody has the run any more; a process that still believes it does sees that and ends."""
        (self.path / "worker.json").unlink(missing_ok=True)

    def ended(self) -> bool:
        """Whether nothing more will be written."""
        return self.info().state in ENDED

    def _read(self, name: str) -> str:
        return (self.path / name).read_text()

    def _write(self, info: RunInfo) -> RunInfo:
        self._replace("state.json", info.model_dump_json(indent=2))
        return info

    def _replace(self, name: str, text: str) -> None:
        partial = self.path / f".{name}.{socket.gethostname()}.{os.getpid()}"
        partial.write_text(text)
        partial.replace(self.path / name)
