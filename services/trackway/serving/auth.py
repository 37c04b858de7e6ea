"""Authentication: a bearer token or `x-api-key`, or, for a service without tokens, a caller on this machine.

If tokens are configured, a request without one always gets the same 401, whatever its path and method, and only its
headers are read. `GET /health` and `GET /ready` alone also answer callers on this machine, as probes.

"On this machine" means a loopback address (Ray Serve's proxy forwards the client's), no header of a reverse proxy, and
no browser page of another host, by its `Origin`, by `Sec-Fetch-Site` (an `<img>` sends no `Origin`), or by a host name
that resolves to this machine.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from urllib.parse import urlsplit

from fastapi import FastAPI, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from trackway.serving.error_responses import error_response
from trackway.serving.tokens import AuthScope, Caller, TokenTable, digest_of
from trackway.wire.errors import ErrorCode, TrackwayError

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
