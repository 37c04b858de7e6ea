"""Backends by name: MLflow's experiments and Weave's projects.

The MLflow endpoint resolves experiment names to ids when a batch is sent, not when a run starts. A run therefore never
waits for a server that is down or starting, and a batch from disk keeps its destination.

The entity of a Weave project may be left to the API key's account. `project_url` is its page in W&B's app.
"""

import base64
import logging
import os
import ssl
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from urllib.parse import quote, unquote

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from trackway.tracing import attributes as names
from trackway.tracing.export.otlp import Answer, Batch, Endpoint, SendOutcome, answer_of
from trackway.tracing.local_mlflow import client as local_mlflow
from trackway.tracing.settings import HOSTED_WEAVE, TracingSettings
from trackway.wire.trajectory import TraceBackend

_BY_NAME = "name:"


class DeletedExperiment(Exception):
    """An MLflow experiment that does not accept spans."""


def experiment_by_name(name: str) -> str:
    """A placeholder for an experiment's id in settings and targets, resolved by name on sending."""
    return _BY_NAME + quote(name, safe="")  # it travels in headers, which take ASCII only


class MlflowEndpoint(Endpoint):
    """Sends batches to the server at `settings.mlflow_uri`, and creates the experiments they name.

    If MLflow is in `settings.collected`, the batches are sent to the OTLP collector instead.
    """

    def __init__(self, settings: TracingSettings) -> None:
        self._server = lambda: local_mlflow.server_uri(settings.mlflow_uri or "")
        self._credentials = credentials()
        self._experiments: dict[str, str] = {}
        url, headers = (lambda: f"{self._server()}/v1/traces"), self._credentials
        if TraceBackend.MLFLOW in settings.collected:
            url, headers = (lambda: settings.otlp_endpoint or ""), settings.otlp_headers
        verify, trust_env = _tls_and_environment(settings.mlflow_uri or "")
        super().__init__(url, headers, settings.export_timeout_s, verify=verify, trust_env=trust_env)

    def post(self, batch: Batch) -> Answer:
        """Send one batch to the experiment it names. Never raises."""
        wanted = batch.headers.get(names.MLFLOW_EXPERIMENT_HEADER, "")
        if not wanted.startswith(_BY_NAME):
            return super().post(batch)
        known = wanted in self._experiments
        answer = self._post_to(wanted, batch)
        if known and answer.reason.startswith("HTTP 404"):
            del self._experiments[wanted]  # the address now serves another database
            return self._post_to(wanted, batch)
        return answer

    def _post_to(self, wanted: str, batch: Batch) -> Answer:
        try:
            if wanted not in self._experiments:
                self._experiments[wanted] = experiment_id(self._ask, unquote(wanted.removeprefix(_BY_NAME)))
        except httpx.HTTPStatusError as error:
            return answer_of(error.response, batch.spans)
        except Exception as error:
            # Any error, including a server that does not start, must not end the sending thread.
            answered = isinstance(error, DeletedExperiment)
            return Answer(SendOutcome.LATER, reason=f"{type(error).__name__}: {error}", answered=answered)
        addressed = {**batch.headers, names.MLFLOW_EXPERIMENT_HEADER: self._experiments[wanted]}
        return super().post(replace(batch, headers=addressed))

    def _ask(self, method: str, call: str, **content: dict[str, str]) -> httpx.Response:
        url = f"{self._server()}/api/2.0/mlflow/{call}"
        asked = self._http.request(method, url, headers=self._credentials, **content)  # pyright: ignore[reportArgumentType]
        return self._in_time(asked)


def experiment_id(ask: Callable[..., httpx.Response], name: str) -> str:
    """The id of the experiment with this name, which is created if needed; safe for concurrent callers.

    `ask(method, call, **content)` sends a request to MLflow's REST API. Raises httpx.HTTPStatusError for an unexpected
    answer, DeletedExperiment, and whatever `ask` raises.
    """
    experiment = _experiment(ask, name)
    if experiment is None:
        reply = ask("POST", "experiments/create", json={"name": name})
        if "RESOURCE_ALREADY_EXISTS" not in reply.text:
            return str(reply.raise_for_status().json()["experiment_id"])
        experiment = _experiment(ask, name)
    if experiment is None or experiment["lifecycle_stage"] != "active":
        raise DeletedExperiment(f"{name!r}; restore it, or choose another project_name")
    return str(experiment["experiment_id"])


def _experiment(ask: Callable[..., httpx.Response], name: str) -> dict[str, object] | None:
    reply = ask("GET", "experiments/get-by-name", params={"experiment_name": name})
    return None if reply.status_code == 404 else reply.raise_for_status().json()["experiment"]


def mlflow_http(uri: str, timeout_s: float) -> httpx.Client:
    """An HTTP client for the server behind an MLflow tracking URI, with MLflow's own variables for TLS."""
    verify, trust_env = _tls_and_environment(uri)
    return httpx.Client(timeout=timeout_s, trust_env=trust_env, verify=verify)


def _tls_and_environment(uri: str) -> tuple[bool | ssl.SSLContext, bool]:
    """httpx's `verify` and `trust_env`."""
    is_remote = uri.startswith("http")  # else it is on this machine, and no proxy is between
    certificate = os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH")
    is_checked = os.environ.get("MLFLOW_TRACKING_INSECURE_TLS", "").lower() not in ("true", "1")
    return ssl.create_default_context(cafile=certificate) if certificate and is_checked else is_checked, is_remote


def condition(field: str, value: str) -> str:
    """Return MLflow's condition on a text, where `*` matches anything. Raises ValueError with both kinds of quotes."""
    if "'" in value and '"' in value:
        raise ValueError(f"MLflow cannot search for a text with both kinds of quotes, got {value!r}; use one kind or *")
    quote = '"' if "'" in value else "'"
    operator, text = ("LIKE", value.replace("*", "%")) if "*" in value else ("=", value)
    return f"{field} {operator} {quote}{text}{quote}"


def credentials() -> dict[str, str]:
    """The authorization header from MLflow's environment variables. Empty without them."""
    token = os.environ.get("MLFLOW_TRACKING_TOKEN")
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if token:
        return {"authorization": f"Bearer {token}"}
    if user:
        pair = f"{user}:{os.environ.get('MLFLOW_TRACKING_PASSWORD', '')}"
        return {"authorization": "Basic " + base64.b64encode(pair.encode()).decode()}
    return {}


logger = logging.getLogger("trackway.tracing")

HOSTED_WANDB = "https://api.wandb.ai"
_QUERY = "query DefaultEntity { viewer { defaultEntity { name } } }"
_DEADLINE_S = 10.0


class _Entity(BaseModel):
    name: str


class _Viewer(BaseModel):
    defaultEntity: _Entity


class _Data(BaseModel):
    viewer: _Viewer


class _Answer(BaseModel):
    data: _Data


def full_project(name: str, key: SecretStr | None) -> str | None:
    """`entity/project`. The entity is the name's own, else WANDB_ENTITY, else the owner of the key at W&B.

    None when nothing says the entity, or the name is not of this form. Blocking when W&B is asked.
    """
    entity, slash, project = name.rpartition("/")
    if project and not slash:
        entity = os.environ.get("WANDB_ENTITY") or (default_entity(key) if key else None) or ""
    return f"{entity}/{project}" if entity and project and "/" not in entity else None


def project_url(project: str, trace_server: str) -> str | None:
    """The page of `entity/project` in W&B's app, as weave's client builds it, or None where the app is unknown.

    WANDB_APP_URL and WANDB_BASE_URL say it, else the trace server: W&B's own, or `https://<host>/traces`.
    """
    app = os.environ.get("WANDB_APP_URL") or _app_of(os.environ.get("WANDB_BASE_URL") or _api_of(trace_server))
    return f"{app.rstrip('/')}/{quote(project)}" if app else None


def _api_of(trace_server: str) -> str:
    """The API that belongs to a trace server. Empty if unknown."""
    if trace_server.rstrip("/") == HOSTED_WEAVE:
        return HOSTED_WANDB
    host, _, path = trace_server.rstrip("/").rpartition("/")
    return host if path == "traces" else ""


def _app_of(api: str) -> str:
    """The app of an API, by W&B's rule: api.wandb.ai has wandb.ai, other `api.` hosts `app.`, others themselves."""
    return api.replace("://api.", "://" if "://api.wandb." in api else "://app.")


def default_entity(key: SecretStr) -> str | None:
    """The key's default entity, asked of WANDB_BASE_URL or hosted W&B. None, with a warning, when it is not told."""
    try:
        return _asked(key.get_secret_value(), os.environ.get("WANDB_BASE_URL") or HOSTED_WANDB)
    except (httpx.HTTPError, ValidationError) as error:
        logger.warning("W&B did not tell whose API key this is: %s", str(error).splitlines()[0])
        return None


@lru_cache(maxsize=8)
def _asked(key: str, url: str) -> str:
    answer = httpx.post(
        f"{url.rstrip('/')}/graphql", json={"query": _QUERY}, auth=("api", key), timeout=_DEADLINE_S
    ).raise_for_status()
    return _Answer.model_validate_json(answer.content).data.viewer.defaultEntity.name
