"""The bearer token of calls: an explicit one, else TRACKWAY_TOKEN."""

import os
import re

from pydantic import SecretStr

from trackway.wire.errors import ErrorCode, TrackwayError

TOKEN = "TRACKWAY_TOKEN"
"""Environment variable with the token for all services."""


def resolve_token(explicit: SecretStr | None = None) -> SecretStr | None:
    """The token to send, or None; an empty explicit token means none. Raises TrackwayError for an invalid token."""
    token = (os.environ.get(TOKEN, "") if explicit is None else explicit.get_secret_value()).strip()
    if token and re.fullmatch(r"[!-~]+", token) is None:
        message = f"{TOKEN}: expected printable ASCII without spaces, got other characters; copy the token again"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
    return SecretStr(token) if token else None


def authorization(token: SecretStr | None) -> dict[str, str]:
    """The request header that carries the token."""
    return {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}
