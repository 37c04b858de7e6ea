"""The tool server's list of tools, fetched once and cached for a limited time."""

import asyncio
import time
from dataclasses import dataclass

from trackway.clients import ToolsClient
from trackway.wire.agent import GroupRequest
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ToolList


@dataclass(frozen=True)
class ToolSet:
    """The tools that a trajectory may call."""

    schemas: list[ToolSchema]
    stateless: frozenset[str] = frozenset()
    """Names of the stateless tools, which need no instance."""

    @property
    def names(self) -> list[str]:
        """Names of the tools, in the order of the server or of the request."""
        return [schema.function.name for schema in self.schemas]


class ToolCatalog:
    """The tool server's list. Trajectories that start together share a request."""

    def __init__(self, client: ToolsClient, refresh_s: float) -> None:
        self._client = client
        self._refresh_s = refresh_s
        self._known_until = 0.0
        self._listing: asyncio.Task[ToolList] | None = None

    async def offered(self, request: GroupRequest) -> ToolSet:
        """The tools of this request: its `tools`, narrowed by the row's `extra_info.tool_selection` (as verl).

        Raises:
            TrackwayError: `unknown_tool` when one of them is not on the server; the client's errors.
        """
        listed = await self._list()
        known = {schema.function.name: schema for schema in listed.tools}
        wanted = list(known) if request.tools is None else request.tools
        selection = request.sample.extra_info.get("tool_selection")
        if isinstance(selection, list):
            wanted = [name for name in wanted if name in selection]
        missing = [name for name in wanted if name not in known]
        if missing:
            message = f"expected tools of the server ({sorted(known)}), got {missing}; add them to its configuration"
            raise TrackwayError(ErrorCode.UNKNOWN_TOOL, message)
        return ToolSet([known[name] for name in wanted], frozenset(listed.stateless))

    async def _list(self) -> ToolList:
        listing = self._listing
        if listing is None or (listing.done() and not self._fresh(listing)):
            listing = self._listing = asyncio.create_task(self._client.offer())
            self._known_until = time.monotonic() + self._refresh_s
        # Cancelling one trajectory must not cancel the request for the others.
        return await asyncio.shield(listing)

    def _fresh(self, listing: asyncio.Task[ToolList]) -> bool:
        failed = listing.cancelled() or listing.exception() is not None
        return not failed and time.monotonic() < self._known_until
