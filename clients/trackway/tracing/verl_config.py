"""verl's `RolloutTraceConfig`: configures tracing of a custom agent loop with one call per process.

`init` does not block: the MLflow experiment, and the server of a local database, are created in the background while
spans wait in memory and on disk.
"""

import atexit
import contextlib
import hashlib
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from trackway.tracing.export.backends import experiment_by_name, full_project
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.tracing.local_mlflow.client import local_database
from trackway.tracing.provider import Tracing
from trackway.tracing.settings import TracingSettings
from trackway.tracing.span_handle import install, uninstall
from trackway.wire.trajectory import TraceBackend, TraceTarget

logger = logging.getLogger("trackway.tracing")

DEFAULT_MLFLOW_URI = "sqlite:///mlflow.db"
"""Without MLFLOW_TRACKING_URI: a file in the working directory, MLflow's own default there."""
EXIT_DEADLINE_S = 10.0
"""Longest wait for the backends when the process ends."""
STARTING_DEADLINE_S = local_mlflow.START_DEADLINE_S
"""Longest wait at exit while the local MLflow server is still starting, as in a first, short run."""

_guard = threading.RLock()


class RolloutTraceConfig:
    """The tracing of this process; a singleton that `init` configures once."""

    _instance: ClassVar["RolloutTraceConfig | None"] = None

    def __init__(self) -> None:
        self.backend: str | None = None
        """Names of the backends, with a comma between several, or None when nothing is traced."""
        self.client: Tracing | None = None
        self.token2text: bool = False
        self.project_name: str | None = None
        self.experiment_name: str | None = None
        self.max_samples_per_step_per_worker: int | None = None
        """Used by the worker that selects the samples to trace; None traces all."""
        self.target = TraceTarget()
        """The target sent with each trace to the services it reaches."""
        self._initialized = False

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | Sequence[str] | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """Trace to `backend` (mlflow, weave, otlp; a list or `mlflow,weave` for several); None or verl's `dummy`
        disables tracing.

        Keys and addresses come from the environment (`TracingSettings`). MLflow: the experiment is `project_name`,
        created with the first spans. Weave: the project is `entity/project`; without an entity, it is
        WANDB_ENTITY's, or the API key's default, which is queried from W&B.
        A second call does nothing until `reset`.

        Raises:
            ValueError: a backend is unknown, a key or address is missing, or a number is negative; nothing is started.
        """
        with _guard:
            config = cls.get_instance()
            if config._initialized:
                return
            backends = _parsed(backend)
            if max_samples_per_step_per_worker is not None and max_samples_per_step_per_worker < 0:
                raise ValueError(
                    f"max_samples_per_step_per_worker: expected 0 or more, or None for all, "
                    f"got {max_samples_per_step_per_worker}"
                )
            if backends:
                config._start(backends, project_name, token2text)
            config.backend = ",".join(backends) or None
            config.project_name, config.experiment_name = project_name, experiment_name
            config.token2text = token2text
            config.max_samples_per_step_per_worker = max_samples_per_step_per_worker
            config._initialized = True

    @classmethod
    def get_instance(cls) -> "RolloutTraceConfig":
        """The process's configuration, which traces nothing before `init`."""
        with _guard:
            if cls._instance is None:
                cls._instance = cls()
            return cls._instance

    @classmethod
    def get_backend(cls) -> str | None:
        """The names of the backends, separated by commas, or None when nothing is traced."""
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> Tracing | None:
        """The process's tracing: `flush(seconds)` before a process is killed, `stats()` for lost spans."""
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool:
        """Return whether traced operations carry decoded text."""
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Send waiting spans for at most `EXIT_DEADLINE_S` seconds and drop the rest. `init` may be called again."""
        with _guard:
            config, cls._instance = cls._instance, None
        if config is not None and config.client is not None:
            uninstall(config.client)
            config.client.shutdown(EXIT_DEADLINE_S)

    def _start(self, backends: Sequence[TraceBackend], project_name: str, token2text: bool) -> None:
        settings = _settings(backends, project_name, token2text)
        self.target = TraceTarget(
            backends=tuple(backends),
            mlflow_experiment_id=settings.experiment_id,
            weave_project=settings.weave_project,
            token2text=token2text,
        )
        self.client = Tracing("agent", settings, root_operations=True)
        install(self.client)
        atexit.register(_at_exit, self.client)
        if settings.mlflow_uri is not None and not local_mlflow.answers(settings.mlflow_uri):
            threading.Thread(target=_start_server, args=(settings.mlflow_uri,), daemon=True).start()


def _parsed(backend: str | Sequence[str] | None) -> list[TraceBackend]:
    requested = backend.split(",") if isinstance(backend, str) else backend or ()
    wanted = list(dict.fromkeys(name for item in requested if (name := str(item).strip().lower())))
    if wanted == ["dummy"]:
        return []
    known: dict[str, TraceBackend] = {backend.value: backend for backend in TraceBackend}
    unknown = [name for name in wanted if name not in known]
    if unknown:
        raise ValueError(
            f"unknown trace backend {', '.join(unknown)}: expected {', '.join(known)}, or None for no traces"
        )
    return [known[name] for name in wanted]


def _settings(backends: Sequence[TraceBackend], project_name: str, token2text: bool) -> TracingSettings:
    """Settings from the environment for these backends only. Raises ValueError when a backend is not configured."""
    environment = TracingSettings(backends=list(backends), token2text=token2text)
    mlflow, weave = TraceBackend.MLFLOW in backends, TraceBackend.WEAVE in backends
    project = full_project(project_name, environment.weave_api_key) if weave else None
    settings = environment.model_copy(
        update={
            "mlflow_uri": _mlflow_uri(environment.mlflow_uri) if mlflow else None,
            "experiment_id": experiment_by_name(project_name) if mlflow else None,
            "weave_api_key": environment.weave_api_key if weave else None,
            "weave_project": project,
            "otlp_endpoint": environment.otlp_endpoint if TraceBackend.OTLP in backends else None,
        }
    )
    problems = [missing for backend in backends if (missing := settings.missing(backend))]
    if weave and project is None:
        problems.append(
            f"trace backend weave: expected project_name as entity/project, got {project_name!r}; "
            "use that form, or set WANDB_ENTITY"
        )
    if problems:
        raise ValueError("; ".join(problems))
    return settings.model_copy(update={"spool_dir": _spool_dir(settings)})


def _mlflow_uri(configured: str | None) -> str:
    """The URI with the absolute path of a database, independent of the working directory."""
    uri = configured or DEFAULT_MLFLOW_URI
    local_mlflow.check(uri)
    database = local_database(uri)
    return uri if database is None else f"sqlite:///{database}"


def _spool_dir(settings: TracingSettings) -> Path | None:
    """A folder for this user and these addresses; later processes with the same addresses adopt its files."""
    addresses = repr((settings.mlflow_uri, settings.weave_api_key and settings.weave_url, settings.otlp_endpoint))
    name = hashlib.sha256(addresses.encode()).hexdigest()[:16]
    try:
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        folder = state / "trackway" / "spool" / name
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError) as error:  # no home, or not ours
        logger.warning("traces are queued in memory only, because the disk queue has no folder: %s", error)
        return None
    return folder


def _start_server(uri: str) -> None:
    """Start the server early, because a start takes seconds. Errors are reported by the backend's queue."""
    with contextlib.suppress(Exception):
        local_mlflow.server_uri(uri)


def _at_exit(client: Tracing) -> None:
    if client is not RolloutTraceConfig.get_client() or not client.stats().ended:
        return
    uri = client.settings.mlflow_uri
    starting = uri is not None and not local_mlflow.answers(uri)
    if client.shutdown(STARTING_DEADLINE_S if starting else EXIT_DEADLINE_S):
        return
    stats = client.stats()
    waiting = sum(backend.waiting for backend in stats.backends.values())
    logger.warning(
        "not all spans were exported: %d lost; %d wait in %s for the next process with the same backends",
        stats.lost,
        waiting,
        client.settings.spool_dir,
    )


def _forget_after_fork() -> None:
    """Reset in a forked child, which has no threads of the parent. It traces once it calls `init`."""
    global _guard
    _guard = threading.RLock()
    client = RolloutTraceConfig.get_client()
    RolloutTraceConfig._instance = None
    if client is not None:
        uninstall(client)


os.register_at_fork(after_in_child=_forget_after_fork)
