"""The `python` tool on a tool server in this process, and what the machine sees of it."""

import os
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from fastapi import FastAPI
from pydantic import JsonValue

from trackway.clients.base import Deadline
from trackway.clients.tools import ToolsClient
from trackway.tools.app import create_app
from trackway.tools.settings import ToolsSettings
from trackway.wire.tools import ExecuteRequest, OneShotRequest, ToolResult

Run = Callable[[FastAPI], AbstractAsyncContextManager[httpx.AsyncClient]]

SMALL: dict[str, JsonValue] = {"timeout_s": 10.0, "memory_mb": 256, "processes": 16, "disk_mb": 4}
LOST = "its variables are lost, the next call starts a fresh one]"


@dataclass
class Session:
    """One instance of the tool."""

    client: ToolsClient
    instance_id: str

    async def result(self, code: str, deadline: Deadline | None = None) -> ToolResult:
        return await self.client.execute(self.instance_id, ExecuteRequest(arguments={"code": code}), deadline=deadline)

    async def __call__(self, code: str) -> str:
        """The text of one call."""
        return (await self.result(code)).text

    async def release(self) -> None:
        await self.client.release(self.instance_id)


@dataclass
class Server:
    """A tool server that offers `python`."""

    client: ToolsClient

    async def session(self) -> Session:
        return Session(self.client, (await self.client.create("python")).instance_id)

    async def once(self, code: str) -> str:
        """The text of a call that needs no instance."""
        return (await self.client.one_shot("python", OneShotRequest(arguments={"code": code}))).text


@asynccontextmanager
async def served(running: Run, limits: dict[str, float] | None = None, /, **config: JsonValue) -> AsyncIterator[Server]:
    """A server within small bounds; `config` is laid over them."""
    settings = ToolsSettings.model_validate(
        {"tools": ["python"], "tool_config": {"python": {**SMALL, **config}}, **(limits or {})}
    )
    async with running(create_app(settings)) as http:
        yield Server(ToolsClient("http://tools", http))


def processes_with(marker: str) -> list[int]:
    """This machine's other processes that have the marker on their command line."""
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes()
            except OSError:
                continue  # it ended meanwhile
            if marker.encode() in words:
                found.append(int(folder.name))
    return found


def leaving(marker: str) -> str:
    """Code that leaves a process behind which no group, session or open file ties to the interpreter.

    It returns when that process has its own command line: nothing in a sandbox runs after the call.
    """
    return f"""
import os, sys
started, at_exec = os.pipe()
os.dup2(at_exec, 120, inheritable=False)
os.close(at_exec)
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.closerange(0, 100)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", "import time; time.sleep(600)", "{marker}"])
    os._exit(0)
os.close(120)
os.wait()
os.read(started, 1)
os.close(started)
"""
