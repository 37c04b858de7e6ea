"""httpx's own connection pool against the aiohttp transport: client CPU per request, by requests in flight.

    .venv/bin/python benchmarks/http_transport.py

The agent keeps a step's rollouts in flight at once. httpx's pool looks at every connection for every request.
"""

import asyncio
import time

import httpx
import uvicorn
from fastapi import FastAPI
from httpx_aiohttp import AiohttpTransport

from trackway.system import free_port

REQUESTS = 800
LIMITS = httpx.Limits(max_connections=512, max_keepalive_connections=256)

app = FastAPI()


@app.post("/answer")
async def answer() -> dict[str, int]:
    """Answers after 50 ms, like a short generation."""
    await asyncio.sleep(0.05)
    return {"value": 1}


async def cpu_ms(client: httpx.AsyncClient, url: str, in_flight: int) -> float:
    """Milliseconds of this process's CPU per request; the server in it costs the same for both."""
    slots = asyncio.Semaphore(in_flight)

    async def one() -> None:
        async with slots:
            (await client.post(url, content=b"{}", timeout=30)).raise_for_status()

    started = time.process_time()
    await asyncio.gather(*(one() for _ in range(REQUESTS)))
    return (time.process_time() - started) / REQUESTS * 1000


async def main() -> None:
    """Print a line for each number of requests in flight."""
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    url = f"http://127.0.0.1:{port}/answer"
    for in_flight in (16, 96, 256):
        async with (
            httpx.AsyncClient(limits=LIMITS) as plain,
            httpx.AsyncClient(transport=AiohttpTransport(limits=LIMITS)) as aio,
        ):
            own, theirs = await cpu_ms(plain, url, in_flight), await cpu_ms(aio, url, in_flight)
        print(f"{in_flight:4} in flight: httpx {own:5.2f}, aiohttp {theirs:5.2f} CPU ms a request  {own / theirs:.1f}x")
    server.should_exit = True
    await serving


if __name__ == "__main__":
    asyncio.run(main())
