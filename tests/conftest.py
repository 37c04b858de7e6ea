"""Fixtures that the whole suite shares."""

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before torch or numpy is imported: oversubscription costs up to 50x

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Protocol

import httpx
import pytest
from fastapi import FastAPI


class Running(Protocol):
    """Starts an app in this process and gives a client for it."""

    def __call__(self, app: FastAPI) -> AbstractAsyncContextManager[httpx.AsyncClient]: ...


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def running() -> Running:
    """`async with running(app) as client`: the app over ASGI, its lifespan included."""

    @asynccontextmanager
    async def run(app: FastAPI) -> AsyncIterator[httpx.AsyncClient]:
        async with app.router.lifespan_context(app):
            transport = httpx.ASGITransport(app=app)
            async with httpx.AsyncClient(transport=transport, base_url="http://service") as client:
                yield client

    return run
