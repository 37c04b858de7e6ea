"""A service with an agent's and an operator's token, and what a refusal looks like."""

from pathlib import Path

import httpx
from fastapi import APIRouter, Depends, FastAPI

from trackway.serving import ServiceSettings, needs_admin, service_app
from trackway.tracing import Tracing

AGENT, OPERATOR = "agent-0123456789abcdef", "operator-0123456789abcdef"
TOKENS = {"agents": {"secret": AGENT}, "ops": {"secret": OPERATOR, "scopes": ["admin"]}}

NEEDS_TOKEN = (
    b'{"error":{"code":"unauthorized","message":"expected a bearer token that this service knows; send '
    b'`Authorization: Bearer <token>`","retryable":false,"detail":{}}}'
)


def app_with(auth: dict[str, object], tracing: Tracing | None = None) -> FastAPI:
    """A service with one route for agents and one for operators."""
    router = APIRouter()

    @router.post("/work")
    async def work() -> str:
        return "worked"

    @router.post("/pause", dependencies=[Depends(needs_admin)])
    async def pause() -> str:
        return "paused"

    settings = ServiceSettings.model_validate({"auth": auth, "max_body_bytes": 1024, "replica": "abcd"})
    return service_app("tools", settings, routers=[router], tracing=tracing)


def bearer(token: str) -> dict[str, str]:
    """The header that carries a token."""
    return {"authorization": f"Bearer {token}"}


def client_from(address: str | None, app: FastAPI, host: str = "127.0.0.1:8000") -> httpx.AsyncClient:
    """A client of the app whose requests come from this address."""
    client = None if address is None else (address, 4711)
    transport = httpx.ASGITransport(app=app, client=client)  # pyright: ignore[reportArgumentType]
    return httpx.AsyncClient(transport=transport, base_url=f"http://{host}")


def write_tokens(path: Path, content: str) -> None:
    """Replace the file in one step, as a mounted secret is."""
    new = path.with_suffix(".new")
    new.write_text(content)
    new.chmod(0o400)
    new.replace(path)
