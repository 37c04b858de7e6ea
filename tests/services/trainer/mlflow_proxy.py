"""What stands between a run and a real MLflow server in tests: it is slow, loses answers, or is not there."""

import asyncio
import threading
from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI, Request, Response


@dataclass
class Proxy:
    """Passes requests on to `upstream`."""

    upstream: str
    feedback_delay_s: float = 0.0
    """Before each value of feedback is passed on."""
    unanswered: list[str] = field(default_factory=list)
    """Calls, by the end of their path, whose next request is passed on and never answered; each counts once."""
    held: list[str] = field(default_factory=list)
    """Calls whose next request is passed on only when `released`, and never answered."""
    released: threading.Event = field(default_factory=threading.Event)
    passed_on: threading.Event = field(default_factory=threading.Event)
    """A held request has been answered by the server."""
    calls: list[str] = field(default_factory=list)
    """The path of each request."""

    def app(self) -> FastAPI:
        app = FastAPI()

        @app.api_route("/{path:path}", methods=["GET", "POST", "PATCH"])
        async def forward(path: str, request: Request) -> Response:
            self.calls.append(path)
            body = await request.body()
            if _take(self.held, path):
                asyncio.get_running_loop().run_in_executor(None, self._pass_on_later, request.method, path, body)
                return await _given_up(request)
            await asyncio.sleep(self.feedback_delay_s if path.endswith("assessments") else 0.0)
            answer = await asyncio.to_thread(self._pass_on, request.method, path, body, str(request.url.query))
            if _take(self.unanswered, path):
                return await _given_up(request)
            return Response(answer.content, answer.status_code, media_type=answer.headers.get("content-type"))

        return app

    def _pass_on(self, method: str, path: str, body: bytes, query: str = "") -> httpx.Response:
        url = f"{self.upstream}/{path}" + (f"?{query}" if query else "")
        return httpx.request(method, url, content=body, headers={"content-type": "application/json"}, timeout=60)

    def _pass_on_later(self, method: str, path: str, body: bytes) -> None:
        self.released.wait(30)
        self._pass_on(method, path, body)
        self.passed_on.set()

    def count(self, call: str) -> int:
        """How often a call was made."""
        return sum(path.endswith(call) for path in self.calls)


async def _given_up(request: Request) -> Response:
    """No answer until the client gives up."""
    while not await request.is_disconnected():
        await asyncio.sleep(0.02)
    return Response()


def _take(calls: list[str], path: str) -> bool:
    found = next((call for call in calls if path.endswith(call)), None)
    if found is not None:
        calls.remove(found)
    return found is not None
