"""Settings of backends and span contents, and the redaction hook that they name, which keeps secrets out of traces.

Defaults come from the usual MLflow, W&B and OpenTelemetry variables. The hook is a function from text to text, applied
to every text.
"""

import importlib
import logging
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

from opentelemetry.util.re import parse_env_headers
from pydantic import BaseModel, Field, SecretStr, field_validator

from trackway.wire.trajectory import TraceBackend

HOSTED_WEAVE = "https://trace.wandb.ai"


def _env(*names: str) -> Callable[[], str | None]:
    """A default factory: the first of these environment variables that is set and not empty."""
    return lambda: next((value for name in names if (value := os.environ.get(name))), None)


def _key_in_env() -> SecretStr | None:
    key = _env("WANDB_API_KEY")()
    return SecretStr(key) if key else None


def _project_in_env() -> str | None:
    entity, project = _env("WANDB_ENTITY")(), _env("WANDB_PROJECT")()
    return f"{entity}/{project}" if entity and project else None


def _otlp_in_env() -> str | None:
    """The OTLP URL by OpenTelemetry's rule: the traces variable is a full URL, the general one gets `/v1/traces`."""
    traces_url, base_url = _env("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")(), _env("OTEL_EXPORTER_OTLP_ENDPOINT")()
    return traces_url or (f"{base_url.rstrip('/')}/v1/traces" if base_url else None)


def _headers_in_env() -> dict[str, str]:
    headers = _env("OTEL_EXPORTER_OTLP_TRACES_HEADERS", "OTEL_EXPORTER_OTLP_HEADERS")()
    return dict(parse_env_headers(headers, liberal=True)) if headers else {}


SPOOL_FOLDER = "spool"
"""Subfolder of the outputs folder for traces that a backend has not accepted yet."""


class TracingSettings(BaseModel):
    """Destination of spans, and how much text they carry."""

    backends: list[TraceBackend] | None = None
    """Backends of runs that name none. None takes MLflow if its URI is set, else OTLP if its endpoint is set."""
    mlflow_uri: str | None = Field(default_factory=_env("MLFLOW_TRACKING_URI"))
    """MLflow: a server, or a local `sqlite:///file.db` or folder, for which one server is started or reused."""
    experiment_id: str | None = None
    """MLflow experiment of runs that name none. None is MLflow's default experiment."""
    weave_api_key: SecretStr | None = Field(default_factory=_key_in_env)
    """W&B's API key; from WANDB_API_KEY."""
    weave_url: str = Field(default_factory=lambda: _env("WF_TRACE_SERVER_URL")() or HOSTED_WEAVE)
    """Weave's trace server; from WF_TRACE_SERVER_URL. Experimental: nothing has been sent to W&B's own servers."""
    weave_view: Literal["calls", "agents"] = "calls"
    """Weave's view that traces go to: its calls, which `trackway traces` and feedback read, or its Agents view and
    CoreWeave Agent Lens, which read the GenAI conventions."""
    weave_project: str | None = Field(default_factory=_project_in_env)
    """Weave project (`entity/project`) of runs that name none; from WANDB_ENTITY and WANDB_PROJECT."""
    otlp_endpoint: str | None = Field(default_factory=_otlp_in_env)
    """Full OTLP/HTTP URL of a collector; from OTEL_EXPORTER_OTLP_TRACES_ENDPOINT or OTEL_EXPORTER_OTLP_ENDPOINT."""
    otlp_headers: dict[str, str] = Field(default_factory=_headers_in_env)
    """Headers of every OTLP export, e.g. an API key; from OTEL_EXPORTER_OTLP_HEADERS."""
    collected: list[TraceBackend] = Field(default_factory=list)
    """Backends that the OTLP collector forwards to: their traces are sent to the collector once, and never directly.
    Its spans have the attributes that these backends read. `otlp`, like an empty list, means the GenAI conventions."""
    token2text: bool = True
    """Put decoded text on the spans of runs that do not say. False leaves token counts only."""
    redact: str | None = None
    """`package.module:function` from text to text, applied to each text before it is stored on a span."""
    max_text_bytes: int = Field(default=16384, ge=256)
    """Longest text on a span in bytes. A longer one is truncated, with a marker."""
    max_queue_size: int = Field(default=16384, ge=1)
    """Spans waiting to be encoded. Beyond it spans are dropped and counted."""
    schedule_delay_s: float = Field(default=1.0, gt=0)
    """Longest time that a span waits for its batch."""
    export_timeout_s: float = Field(default=120.0, gt=0)
    """Timeout of an export. A slower backend counts as down. Long, because a backend that gets little of a busy machine
    must not be sent the same spans again."""
    spool_dir: Path | None = None
    """Folder for spans that a backend cannot take now. They are sent once it recovers. None keeps them in memory."""
    max_spool_bytes: int = Field(default=256 * 1024 * 1024, ge=0)
    """Bytes on disk per backend and process. Beyond it spans are dropped and counted."""

    @field_validator("weave_project")
    @classmethod
    def _entity_and_project(cls, value: str | None) -> str | None:
        if value is not None and value.count("/") != 1:
            raise ValueError(f"expected entity/project, got {value!r}")
        return value

    @property
    def weave_is_hosted(self) -> bool:
        """Return whether Weave is W&B's own, not a dedicated or self-managed host."""
        return self.weave_url.rstrip("/") == HOSTED_WEAVE

    def missing(self, backend: TraceBackend) -> str | None:
        """Missing setting for this backend, as a sentence with the remedy, or None when there is none."""
        wants = {
            TraceBackend.MLFLOW: (self.mlflow_uri, "an MLflow server: set MLFLOW_TRACKING_URI"),
            TraceBackend.WEAVE: (self.weave_api_key, "W&B's API key: set WANDB_API_KEY"),
            TraceBackend.OTLP: (self.otlp_endpoint, "a receiver: set OTEL_EXPORTER_OTLP_ENDPOINT"),
        }
        [way] = self.sent_to([backend])
        present, sentence = wants[way]
        return None if present else f"trace backend {backend.value} needs {sentence}"

    def sent_to(self, backends: Iterable[TraceBackend]) -> tuple[TraceBackend, ...]:
        """The backends to export spans to: the OTLP collector replaces those it forwards to."""
        return tuple(dict.fromkeys(TraceBackend.OTLP if backend in self.collected else backend for backend in backends))

    def readers(self, backend: TraceBackend) -> tuple[TraceBackend, ...]:
        """The backends whose attributes `backend` is sent."""
        if backend is TraceBackend.WEAVE and self.weave_view == "agents":
            return (TraceBackend.OTLP,)
        behind = tuple(self.collected) if backend is TraceBackend.OTLP else ()
        return behind or (backend,)

    def kept_by(self, backends: Iterable[TraceBackend]) -> set[TraceBackend]:
        """These backends, and those the OTLP collector forwards to if it is one of them."""
        named = set(backends)
        return named | set(self.collected) if TraceBackend.OTLP in named else named

    @property
    def usable(self) -> list[TraceBackend]:
        """Backends that are fully configured."""
        return [backend for backend in TraceBackend if self.missing(backend) is None]

    @property
    def default_backends(self) -> tuple[TraceBackend, ...]:
        """Backends of runs that name none. A W&B key alone does not enable Weave."""
        if self.backends is not None:
            return tuple(self.backends)
        known = [backend for backend in self.usable if backend is not TraceBackend.WEAVE]
        return tuple(known[:1])


logger = logging.getLogger("trackway.tracing")

Redact = Callable[[str], str]

FAILED = "[redaction failed]"


def load_redaction(path: str | None) -> Redact | None:
    """The function named by `package.module:function`, or None for None. Raises ValueError when it does not exist."""
    if path is None:
        return None
    module, _, name = path.partition(":")
    try:
        function: Redact = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError, SystemExit) as error:
        raise ValueError(f"tracing.redact: expected package.module:function, got {path!r}: {error}") from error
    if not callable(function):
        raise ValueError(f"tracing.redact: expected a function, {path!r} is a {type(function).__name__}")
    return function


def redacted_value(value: Any, redact: Redact, keys: bool = False) -> Any:
    """The JSON value with texts, numbers and nested keys redacted, because a secret may be any of them."""
    if isinstance(value, dict):
        hidden = ((redacted(key, redact) if keys else key, item) for key, item in value.items())
        return {key: redacted_value(item, redact, True) for key, item in hidden}
    if isinstance(value, list):
        return [redacted_value(item, redact, True) for item in value]
    if value is None or isinstance(value, bool):
        return value
    text = redacted(str(value), redact)
    return text if isinstance(value, str) or text != str(value) else value


def redacted(text: str, redact: Redact | None) -> str:
    """The redacted text. If the function fails, a placeholder, so that nothing leaks."""
    if redact is None:
        return text
    try:
        return str(redact(text))
    except BaseException as error:  # even a `sys.exit` of the hook must not end the service
        logger.warning("the redaction function raised %s: %s", type(error).__name__, error)
        return FAILED
