"""Finds the bearer token of a call: explicit, from `using_token`, in TRACKWAY_TOKEN, or in TRACKWAY_TOKEN_FILE."""

import os
import re
from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from pydantic import SecretStr

from trackway.system import read_secret
from trackway.wire.errors import ErrorCode, TrackwayError

TOKEN = "TRACKWAY_TOKEN"
"""Environment variable with the token for all services."""
TOKEN_FILE = "TRACKWAY_TOKEN_FILE"
"""Environment variable with the path of a file that has the token."""


_given: ContextVar[SecretStr | None] = ContextVar("trackway_token", default=None)


@contextmanager
def using_token(token: SecretStr | None) -> Generator[None]:
    """Send this token in calls of the block's context. None leaves the environment's."""
    before = _given.set(token or _given.get())
    try:
        yield
    finally:
        _given.reset(before)


def resolve_token(explicit: SecretStr | None = None) -> SecretStr | None:
    """The token to send, or None. An empty explicit token means none. Raises TrackwayError for an invalid token."""
    explicit = _given.get() if explicit is None else explicit
    token = (os.environ.get(TOKEN, "") if explicit is None else explicit.get_secret_value()).strip()
    path = os.environ.get(TOKEN_FILE)
    if path and not token and explicit is None:
        return SecretStr(_checked(_content(Path(path)), f"{TOKEN_FILE} {path}"))
    return SecretStr(_checked(token, TOKEN)) if token else None


def authorization(token: SecretStr | None) -> dict[str, str]:
    """The request header that carries the token."""
    return {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}


def _content(file: Path) -> str:
    try:
        token = read_secret(file, TOKEN_FILE).decode(errors="replace").strip()
    except OSError as error:
        message = f"{TOKEN_FILE} {file}: {error.strerror}; set it to a file that this process can read"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message) from error
    if not token:
        message = f"{TOKEN_FILE} {file}: expected a token, got nothing; write the token into it"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
    return token


def _checked(token: str, source: str) -> str:
    if re.fullmatch(r"[!-~]+", token) is None:
        message = f"{source}: expected printable ASCII without spaces, got other characters; copy the token again"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
    return token
