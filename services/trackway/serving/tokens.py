"""Bearer tokens: their configuration, and the table that maps a token to its caller.

A token is configured in clear or as its sha256, in the settings (`TRACKWAY_AUTH__TOKENS__<NAME>__SECRET`) or in a
file, which is reloaded when it changes. Clear text never appears in a repr, a response, a log or a span.

A pass replaces a token at a single process: callers send it where they cannot verify the server.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import Annotated, NamedTuple, Self

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from trackway.system import read_secret

logger = logging.getLogger("trackway.serving")

LEAST_CHARS = 16
CHECK_EVERY_S = 1.0
"""Minimum time between two checks of the tokens file."""

_CHARS = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750


class AuthScope(StrEnum):
    """The scope of a token: an agent's calls, or an operator's too."""

    EXECUTE = "execute"
    ADMIN = "admin"


class Caller(NamedTuple):
    """The sender of a request and its scopes."""

    name: str
    scopes: frozenset[AuthScope]


class Token(BaseModel):
    """A token: its secret or the secret's sha256, and its scopes."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    secret: SecretStr | None = None
    """The token itself: at least 16 letters, digits and . _ ~ + / -. `openssl rand -hex 32` makes one."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", repr=False)
    """Instead of the secret: `printf %s "$TOKEN" | sha256sum`."""
    scopes: frozenset[AuthScope] = Field(default=frozenset({AuthScope.EXECUTE}), min_length=1)
    """`execute`: an agent's calls; `admin`: also an operator's, such as pausing an engine or starting a run."""

    @field_validator("secret")
    @classmethod
    def _usable(cls, secret: SecretStr | None) -> SecretStr | None:
        if secret is not None and len(secret) < LEAST_CHARS:
            raise ValueError(
                f"expected at least {LEAST_CHARS} characters, got {len(secret)}; try `openssl rand -hex 32`"
            )
        if secret is not None and _CHARS.fullmatch(secret.get_secret_value()) is None:
            raise ValueError("expected letters, digits and . _ ~ + / - (= at the end); try `openssl rand -hex 32`")
        return secret

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.secret is None) == (self.sha256 is None):
            raise ValueError("expected either secret or sha256")
        return self

    @property
    def digest(self) -> bytes:
        """The secret's sha256."""
        return digest_of(self.secret.get_secret_value().encode()) if self.secret else bytes.fromhex(self.sha256 or "")

    def caller(self, name: str) -> Caller:
        """The caller of this token; admin includes execute."""
        return Caller(name, self.scopes | {AuthScope.EXECUTE})


Tokens = dict[Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{1,64}$")], Token]

_TOKENS = TypeAdapter(Tokens, config=ConfigDict(hide_input_in_errors=True))


class AuthSettings(BaseModel):
    """Authentication settings. Without tokens only callers on this machine are answered, with all scopes."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tokens: Tokens = Field(default_factory=dict)
    """Tokens by name. Errors and logs show the name."""
    tokens_file: Path | None = None
    """JSON file of further tokens by name, e.g. a mounted secret: `{"agents": {"secret": "..."}}`; read again when it
    changes."""
    trust_loopback: bool = True
    """True if a caller with a loopback address is on this machine. Set it to false behind a local proxy that hides its
    clients' addresses."""

    @property
    def given(self) -> bool:
        """Return whether callers need a token."""
        return bool(self.tokens) or self.tokens_file is not None


class TokenTable:
    """Every token by its digest. Raises ValueError if the file cannot be read or has no token."""

    def __init__(
        self,
        settings: AuthSettings,
        compare: Callable[[bytes, bytes], bool] = hmac.compare_digest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._compare = compare
        self._clock = clock
        self._pass_key = secrets.token_bytes(32)
        self._looked_at = clock()
        self._version = self._file_version()
        self._known = self._read()

    @classmethod
    def of(cls, settings: AuthSettings) -> Self | None:
        """The table, or None when no token is configured."""
        return cls(settings) if settings.given else None

    def find(self, secret: bytes) -> Caller | None:
        """The caller of a token. All tokens are compared in constant time, so the duration reveals nothing."""
        self._refresh()
        digest, match = digest_of(secret), None
        for known, caller in self._known:
            if self._compare(known, digest):
                match = caller
        return match

    def pass_for(self, digest: bytes) -> str:
        """A pass, valid only at this process, for the token with this sha256 while that token is known."""
        return hmac.digest(self._pass_key, digest, "sha256").hex()

    def _refresh(self) -> None:
        """Reload a changed file. For an unusable one the old tokens stay and one error is logged."""
        now = self._clock()
        if self._settings.tokens_file is None or now - self._looked_at < CHECK_EVERY_S:
            return
        self._looked_at = now
        version = self._file_version()
        if version == self._version:
            return
        self._version = version
        try:
            self._known = self._read()
        except ValueError as error:
            logger.error("the tokens are unchanged: %s", error)

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            status = self._settings.tokens_file and self._settings.tokens_file.stat()
        except OSError:
            return None
        return (status.st_mtime_ns, status.st_ino, status.st_size) if status else None

    def _read(self) -> list[tuple[bytes, Caller]]:
        path = self._settings.tokens_file
        tokens: Mapping[str, Token] = {**self._settings.tokens, **(_tokens_in(path) if path else {})}
        known = [(token.digest, token.caller(name)) for name, token in tokens.items()]
        logger.info("tokens: %s", ", ".join(f"{caller.name} ({'+'.join(caller.scopes)})" for _, caller in known))
        return known + [(digest_of(self.pass_for(digest).encode()), caller) for digest, caller in known]


def _tokens_in(path: Path) -> Tokens:
    try:
        tokens = _TOKENS.validate_json(read_secret(path, "auth.tokens_file"))
    except OSError as error:
        raise ValueError(
            f"auth.tokens_file {path}: {error.strerror}; give a file that this process can read"
        ) from error
    except ValidationError as error:
        raise ValueError(f"auth.tokens_file {path}: {error}") from None
    if not tokens:
        raise ValueError(f"auth.tokens_file {path}: expected at least one token, got none; unset it to go without")
    return tokens


def digest_of(secret: bytes) -> bytes:
    """The sha256 that identifies a token."""
    return hashlib.sha256(secret).digest()
