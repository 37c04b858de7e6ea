"""An app under uvicorn in the event loop of a test."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import uvicorn
from fastapi import FastAPI

_DEADLINE_S = 20.0


@asynccontextmanager
async def serving(app: FastAPI, port: int) -> AsyncIterator[str]:
    """Its URL while it runs. TimeoutError if it does not start, or does not end after the block."""
    config = uvicorn.Config(app, "127.0.0.1", port, log_level="error", lifespan="off")
    config.timeout_graceful_shutdown = 1
    server = uvicorn.Server(config)
    server.capture_signals = suppress  # type: ignore[method-assign]
    serve = asyncio.create_task(server.serve())
    try:
        async with asyncio.timeout(_DEADLINE_S):
            while not server.started:
                assert not serve.done(), f"the server at port {port} did not start"
                await asyncio.sleep(0.005)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        async with asyncio.timeout(_DEADLINE_S):
            await serve
