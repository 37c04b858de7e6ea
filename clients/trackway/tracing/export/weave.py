"""The full name of a Weave project, whose entity may be left to the API key's account, and its place in W&B's app."""

import logging
import os
from functools import lru_cache
from urllib.parse import quote

import httpx
from pydantic import BaseModel, SecretStr, ValidationError

from trackway.tracing.settings import HOSTED_WEAVE

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
