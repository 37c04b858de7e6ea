"""Bearer tokens: how they are configured, and the table that knows who presents one.

A token is given as it is or as its sha256, in the settings (`TRACKWAY_AUTH__TOKENS__<NAME>__SECRET`) or in a file,
which is read again when it changes. What stands here in clear never shows in a repr, an answer, a log or a span.

A pass stands for a token at one process alone: callers send it where they cannot be sure who listens.
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

logger = logging.getLogger("trackway.serving")

LEAST_CHARS = 16
CHECK_EVERY_S = 1.0
"""Shortest time between two looks at the tokens' file."""

_CHARS = re.compile(r"[A-Za-z0-9._~+/-]+=*")  # RFC 6750


class AuthScope(StrEnum):
    """What a token opens: an agent's work, or an operator's too."""

    EXECUTE = "execute"
    ADMIN = "admin"


class Caller(NamedTuple):
    """Who sent a request, and what it may do."""

    name: str
    scopes: frozenset[AuthScope]


class Token(BaseModel):
    """One token: its secret or the secret's sha256, and its scopes."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    secret: SecretStr | None = None
    """The token itself: at least 16 letters, digits and . _ ~ + / -; `openssl rand -hex 32` makes one."""
    sha256: str | None = Field(default=None, pattern="^[0-9a-f]{64}$", repr=False)
    """Instead of the secret: `printf %s "$TOKEN" | sha256sum`."""
    scopes: frozenset[AuthScope] = Field(default=frozenset({AuthScope.EXECUTE}), min_length=1)
    """`execute`: what agents do; `admin`: that, and what operators do, as pausing an engine or starting a run."""

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
        """Who presents this token; admin includes execute."""
        return Caller(name, self.scopes | {AuthScope.EXECUTE})


Tokens = dict[Annotated[str, StringConstraints(pattern="^[A-Za-z0-9._-]{1,64}$")], Token]

_TOKENS = TypeAdapter(Tokens, config=ConfigDict(hide_input_in_errors=True))


class AuthSettings(BaseModel):
    """Who is answered. Without any token: only callers on this machine, who then may do everything."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)

    tokens: Tokens = Field(default_factory=dict)
    """Tokens by name; errors and logs show the name."""
    tokens_file: Path | None = None
    """JSON file of further tokens by name, e.g. a mounted secret: `{"agents": {"secret": "..."}}`; read again when it
    changes."""
    trust_loopback: bool = True
    """Whether a caller with a loopback address is on this machine; set it to false behind a local proxy that hides its
    clients' addresses."""

    @property
    def given(self) -> bool:
        """Whether callers need a token."""
        return bool(self.tokens) or self.tokens_file is not None


class TokenTable:
    """Every token by its digest. ValueError when the file cannot be read or has no token."""

    def __init__(
        self,
        settings: AuthSettings,
        compare: Callable[[bytes, bytes], bool] = hmac.compare_digest,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._compare = compare
        self._clock = clock
        self._own = secrets.token_bytes(32)
        self._looked_at = clock()
        self._version = self._file_version()
        self._known = self._read()

    @classmethod
    def of(cls, settings: AuthSettings) -> Self | None:
        """The table; None when no token is configured."""
        return cls(settings) if settings.given else None

    def find(self, secret: bytes) -> Caller | None:
        """Whose token this is. Every token is compared, each in constant time: the time taken tells nothing."""
        self._refresh()
        digest, found = digest_of(secret), None
        for known, caller in self._known:
            if self._compare(known, digest):
                found = caller
        return found

    def pass_for(self, digest: bytes) -> str:
        """What opens here, and nowhere else, what the token with this sha256 opens, as long as that one is known."""
        return hmac.digest(self._own, digest, "sha256").hex()

    def _refresh(self) -> None:
        """Take a changed file; one that cannot be used leaves what was known, and is said once."""
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
            logger.error("the tokens stay as they were: %s", error)

    def _file_version(self) -> tuple[int, int, int] | None:
        try:
            found = self._settings.tokens_file and self._settings.tokens_file.stat()
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_ino, found.st_size) if found else None

    def _read(self) -> list[tuple[bytes, Caller]]:
        path = self._settings.tokens_file
        tokens: Mapping[str, Token] = {**self._settings.tokens, **(_tokens_in(path) if path else {})}
        known = [(token.digest, token.caller(name)) for name, token in tokens.items()]
        logger.info("tokens: %s", ", ".join(f"{caller.name} ({'+'.join(caller.scopes)})" for _, caller in known))
        return known + [(digest_of(self.pass_for(digest).encode()), caller) for digest, caller in known]


def _tokens_in(path: Path) -> Tokens:
    try:
        mode, content = path.stat().st_mode, path.read_bytes()
        tokens = _TOKENS.validate_json(content)
    except OSError as error:
        raise ValueError(
            f"auth.tokens_file {path}: {error.strerror}; give a file that this process can read"
        ) from error
    except ValidationError as error:
        raise ValueError(f"auth.tokens_file {path}: {error}") from None
    if not tokens:
        raise ValueError(f"auth.tokens_file {path}: expected at least one token, got none; unset it to go without")
    if mode & 0o004:
        logger.warning(
            "auth.tokens_file %s: every user of this machine can read it; chmod o-r (defaultMode: 0400)", path
        )
    return tokens


def digest_of(secret: bytes) -> bytes:
    """The sha256 by which a token is known."""
    return hashlib.sha256(secret).digest()
