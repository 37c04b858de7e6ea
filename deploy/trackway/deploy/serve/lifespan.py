"""Servers of a replica that run as long as its app does."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from fastapi import FastAPI


def within_lifespan(app: FastAPI, served: Callable[[], AbstractAsyncContextManager[None]]) -> None:
    """Enter `served()` at the end of the app's start, and leave it before the app stops."""
    inner = app.router.lifespan_context

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[Mapping[str, object]]:
        async with inner(app) as state, served():
            yield state or {}

    app.router.lifespan_context = lifespan
