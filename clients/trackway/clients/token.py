"""The bearer token that calls carry: the one given, else that of TRACKWAY_TOKEN."""

import os
import re

from pydantic import SecretStr

from trackway.wire.errors import ErrorCode, TrackwayError

TOKEN = "TRACKWAY_TOKEN"
"""Environment variable with the token for all services."""


def token_or_environments(given: SecretStr | None = None) -> SecretStr | None:
    """The token to send, if any; none when an empty one is given. TrackwayError when no header can carry it."""
    token = (os.environ.get(TOKEN, "") if given is None else given.get_secret_value()).strip()
    if token and re.fullmatch(r"[!-~]+", token) is None:
        message = f"{TOKEN}: expected printable ASCII without spaces, got something else; copy the token anew"
        raise TrackwayError(ErrorCode.UNAUTHORIZED, message)
    return SecretStr(token) if token else None


def authorization(token: SecretStr | None) -> dict[str, str]:
    """The request header that carries the token."""
    return {"authorization": f"Bearer {token.get_secret_value()}"} if token else {}
