"""Authentication: a bearer token or `x-api-key`, or, for a service without tokens, a caller on this machine.

A token is configured in clear or as its sha256, in the settings (`TRACKWAY_AUTH__TOKENS__<NAME>__SECRET`) or in a
file, which is reloaded when it changes. Clear text never appears in a repr, a response, a log or a span. A pass
replaces a token at a single process: callers send it where they cannot verify the server.

If tokens are configured, a request without one always gets the same 401, whatever its path and method, and only its
headers are read. `GET /health` and `GET /ready` alone also answer callers on this machine, as probes.

"On this machine" means a loopback address (Ray Serve's proxy forwards the client's), no header of a reverse proxy, and
no browser page of another host, by its `Origin`, by `Sec-Fetch-Site` (an `<img>` sends no `Origin`), or by a host name
that resolves to this machine.
"""

import hashlib
import hmac
import logging
import re
import secrets
import time
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from pathlib import Path
from typing import Annotated, NamedTuple, Self
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
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
from starlette.types import ASGIApp, Receive, Scope, Send

from trackway.serving.routes import error_response
from trackway.system import read_secret
from trackway.wire.errors import ErrorCode, TrackwayError

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


RawHeaders = Iterable[tuple[bytes, bytes]]
Guests = Callable[[str, str, RawHeaders], Caller | None]
"""The caller of a method and path by a key of the service's own, which opens nothing else, or None for anyone else."""

CALLER = "trackway.caller"
"""Key of the ASGI scope: the Caller."""
PROBES = ("/health", "/ready")

_ALL = frozenset(AuthScope)
_LOCAL, _PROBE, _INSIDE = Caller("loopback", _ALL), Caller("probe", frozenset()), Caller("process", _ALL)
_TEST_CLIENT = "testclient"  # Starlette's in-process client; the peer of a socket is always an address
_PROXY_HEADERS = (b"forwarded", b"via", b"x-real-ip")
_CHALLENGE = {"www-authenticate": "Bearer"}
_NEEDS_TOKEN = "expected a bearer token that this service knows; send `Authorization: Bearer <token>`"
_NO_TOKENS = (
    "this service has no tokens and so answers callers on its own machine only; call it there by 127.0.0.1 and without "
    "a proxy, or have its operator give it tokens (TRACKWAY_AUTH__TOKENS_FILE)"
)


class Authentication:
    """Outermost ASGI middleware. `tokens` is None when none are configured."""

    def __init__(
        self,
        app: ASGIApp,
        tokens: TokenTable | None,
        trust_loopback: bool,
        guests: Guests = lambda method, path, headers: None,
    ) -> None:
        self.app = app
        self._guests = guests
        self._tokens = tokens
        self._trust_loopback = trust_loopback
        self._refusal = TrackwayError(ErrorCode.UNAUTHORIZED, _NEEDS_TOKEN if tokens else _NO_TOKENS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif caller := self._caller_of(scope):
            scope[CALLER] = caller
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await error_response(self._refusal, _CHALLENGE)(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008, "reason": ""})

    def _caller_of(self, scope: Scope) -> Caller | None:
        if scope.get(CALLER) is _INSIDE:  # by identity: no request from outside can contain this object
            return _INSIDE
        return self._known(scope) or self._guests(scope.get("method", ""), _path(scope), scope["headers"])

    def _known(self, scope: Scope) -> Caller | None:
        if self._tokens is None:
            return _LOCAL if self._is_local(scope) else None
        secret = _bearer(scope["headers"])
        if secret is not None:
            return self._tokens.find(secret)
        return _PROBE if _is_probe(scope) and self._is_local(scope) else None

    def _is_local(self, scope: Scope) -> bool:
        return self._trust_loopback and _on_this_machine(scope)


def from_inside(app: ASGIApp) -> ASGIApp:
    """The app for callers in its own process, who need no token; outside requests cannot impersonate them."""

    async def marked(scope: Scope, receive: Receive, send: Send) -> None:
        await app({**scope, CALLER: _INSIDE}, receive, send)

    return marked


def presented(request: Request) -> bytes | None:
    """The sha256 of the request's token, or None."""
    secret = _bearer(request.headers.raw)
    return None if secret is None else digest_of(secret)


async def needs_admin(request: Request) -> None:
    """Dependency of operator routes: 403 `forbidden` without the scope `admin`."""
    caller: Caller = request.scope[CALLER]
    if AuthScope.ADMIN not in caller.scopes:
        message = f"expected a token with the scope 'admin', got {caller.name!r} with {', '.join(caller.scopes)!r}"
        raise TrackwayError(ErrorCode.FORBIDDEN, f"{message}; use an operator's token")


def show_tokens_in_docs(app: FastAPI) -> None:
    """Declare in the OpenAPI document that every route needs a bearer token, which adds a button to `/docs`."""
    plain = app.openapi

    def openapi() -> dict[str, object]:
        document = plain()
        document.setdefault("components", {})["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        document["security"] = [{"token": []}]
        return document

    app.openapi = openapi


def _bearer(headers: RawHeaders) -> bytes | None:
    """The presented token, or None for none, several, or another scheme.

    It is a bearer token, or Anthropic's or Tinker's `x-api-key`. Tinker's SDK sends only keys that begin with `tml-`,
    which a token does not have.
    """
    credentials = [(name, value) for name, value in headers if name in (b"authorization", b"x-api-key")]
    if len(credentials) != 1:
        return None
    name, value = credentials[0]
    if name == b"x-api-key":
        return value.strip().removeprefix(b"tml-")
    scheme, _, secret = value.partition(b" ")
    return secret.strip() if scheme.lower() == b"bearer" else None


def presented_key(headers: RawHeaders) -> str | None:
    """The token, or the key of a model's API, that the request carries."""
    secret = _bearer(headers)
    return None if secret is None else secret.decode("latin-1")


def _path(scope: Scope) -> str:
    return scope["path"].removeprefix(scope.get("root_path", ""))


def _is_probe(scope: Scope) -> bool:
    return scope.get("method") == "GET" and _path(scope) in PROBES


def _on_this_machine(scope: Scope) -> bool:
    client = scope.get("client")
    if not client or not (client[0] == _TEST_CLIENT or _is_loopback(client[0])):
        return False
    is_cross_site = has_origin = False
    for name, value in scope["headers"]:
        if name in _PROXY_HEADERS or name.startswith(b"x-forwarded-"):
            return False
        if name == b"origin":
            if not _is_local_name(_host_of(value)):
                return False
            has_origin = True
        if name == b"host" and not _may_be_ours(_host_of(b"//" + value)):
            return False
        is_cross_site = is_cross_site or (name == b"sec-fetch-site" and value == b"cross-site")
    return has_origin or not is_cross_site  # a page of localhost:3000 is another site than 127.0.0.1:8000


def _may_be_ours(host: str) -> bool:
    """Return whether the host is not a public name, which could be made to resolve to this machine (DNS rebinding)."""
    return _is_local_name(host) or ("." not in host and ":" not in host)


def _is_local_name(host: str) -> bool:
    return host == "localhost" or host.endswith(".localhost") or _is_loopback(host)


@lru_cache(1024)
def _host_of(url: bytes) -> str:
    try:
        return urlsplit(url.decode("latin-1")).hostname or ""
    except ValueError:
        return "."


@lru_cache(1024)
def _is_loopback(host: str) -> bool:
    try:
        address = ip_address(host)
    except ValueError:
        return False
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback
