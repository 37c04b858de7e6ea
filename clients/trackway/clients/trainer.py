"""Client of the trainer service."""

from collections.abc import AsyncIterator, Mapping
from urllib.parse import quote

from pydantic import JsonValue

from trackway.clients.base import Deadline, ServiceClient
from trackway.wire.rollout import PolicyInfo
from trackway.wire.sessions import FinishedSession, SessionRun, WaitingSessions
from trackway.wire.trainer import MetricsRow, PolicyRequest, ResumeRequest, RunInfo, RunList, RunRequest


class TrainerClient(ServiceClient):
    """Starts, watches and stops runs. Every method raises TrackwayError."""

    service = "trainer"

    async def start(self, request: RunRequest) -> RunInfo:
        """Start a run and return at once."""
        return await self.call("POST", "/runs", reply=RunInfo, body=request)

    async def runs(self) -> list[RunInfo]:
        """Every run."""
        return (await self.call("GET", "/runs", reply=RunList)).runs

    async def run(self, name: str) -> RunInfo:
        """The state of a run."""
        return await self.call("GET", f"/runs/{name}", reply=RunInfo)

    async def stop(self, name: str) -> RunInfo:
        """Ask a run to save a checkpoint and stop."""
        return await self.call("POST", f"/runs/{name}/stop", reply=RunInfo)

    async def resume(
        self, name: str, skip_damaged: bool = False, changes: Mapping[str, JsonValue] | None = None
    ) -> RunInfo:
        """Resume a run from its last checkpoint; with `skip_damaged` from the last intact one.

        `changes` are new values of keys that leave what is trained as it is.
        """
        path = f"/runs/{name}/resume" + ("?skip_damaged=true" if skip_damaged else "")
        body = ResumeRequest(changes=dict(changes)) if changes else None
        return await self.call("POST", path, reply=RunInfo, body=body)

    async def load_policy(self, name: str, deadline: Deadline | None = None) -> PolicyInfo:
        """Publish a checkpoint, `run:step`, as a policy of the rollout service. Repeating it has no effect."""
        request = PolicyRequest(name=name)
        return await self.call("POST", "/policies", reply=PolicyInfo, body=request, deadline=deadline)

    async def drop_policy(self, name: str) -> PolicyInfo:
        """Remove a policy's weights from the store."""
        return await self.call("POST", "/policies/drop", reply=PolicyInfo, body=PolicyRequest(name=name))

    async def session_run(self, name: str | None) -> SessionRun:
        """Settings that the run, or the one in progress, fixes for the sessions that it trains on."""
        return await self.call("GET", "/sessions/run" + (f"?run={quote(name)}" if name else ""), reply=SessionRun)

    async def train_session(self, name: str, session: FinishedSession) -> WaitingSessions:
        """Hand a finished session to the run. Once this returns it is on the run's disk. Repeating it has no effect."""
        return await self.call("POST", f"/runs/{quote(name)}/sessions", reply=WaitingSessions, body=session)

    async def metrics(
        self, name: str, follow: bool = False, deadline: Deadline | None = None
    ) -> AsyncIterator[MetricsRow]:
        """The metrics of each step. With `follow`, until the run ends."""
        path = f"/runs/{name}/metrics?follow={'true' if follow else 'false'}"
        async with self.stream("GET", path, deadline=deadline) as lines:
            async for line in lines:
                if line:
                    yield MetricsRow.model_validate_json(line)
