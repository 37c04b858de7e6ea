"""The tool interface: four async methods around state that lasts as long as the trajectory.

The class is verl's `verl/tools/base_tool.py` in spirit (create, execute, calc_reward, release). Unlike there, one
instance serves all calls of a trajectory. A tool keeps its state by instance id. The server handles deadlines,
concurrency, argument checks and output size.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, JsonValue

from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.tools import ToolResult

ToolConfig = dict[str, JsonValue]

_session: ContextVar[str | None] = ContextVar("trackway_tool_session", default=None)


class ToolInputError(TrackwayError):
    """An error of the caller (422). The message becomes an observation and should say what to correct."""

    def __init__(self, message: str, **detail: JsonValue) -> None:
        super().__init__(ErrorCode.INVALID_REQUEST, message, **detail)


class ToolLimits(BaseModel):
    """Limits of every call. A tool's config may lower each of them for that tool."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    call_timeout_s: float = Field(default=30.0, gt=0)
    """Time limit of a create, execute, reward or release in seconds. A slower one is cancelled and answered 504."""
    stop_timeout_s: float = Field(default=2.0, gt=0)
    """Seconds for a cancelled call to stop. After that its instance is lost, and its slot stays taken."""
    wait_timeout_s: float = Field(default=60.0, gt=0)
    """Longest wait of a call for its instance and for a free slot of its tool, in seconds; then it is answered 429."""
    tool_concurrency: int = Field(default=64, ge=1)
    """Concurrent calls of a tool on this replica."""
    max_output_chars: int = Field(default=16384, ge=1)
    """Characters of a result's text that are kept. A marker says how many were cut."""

    def narrowed(self, config: Mapping[str, JsonValue]) -> "ToolLimits":
        """These limits, lowered by a tool's config. A config cannot raise them."""
        tool_limits = ToolLimits.model_validate(config)
        bounds = {name: min(getattr(tool_limits, name), getattr(self, name)) for name in tool_limits.model_fields_set}
        return self.model_copy(update=bounds)


class BaseTool(ABC):
    """A tool of the server.

    config: the tool's own settings, and any of ToolLimits' fields.
    tool_schema: the OpenAI function schema that the model sees; arguments are checked against it before `execute`.
    """

    default_schema: ClassVar[ToolSchema | None] = None
    default_config: ClassVar[ToolConfig] = {}
    path_keys: ClassVar[Sequence[str]] = ()
    """Keys of the config that hold local paths. In a tool_config file they are relative to its folder."""
    stateless: bool = False
    """True if calls are independent, so that no instance is needed between them."""

    def __init__(self, config: ToolConfig, tool_schema: ToolSchema) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.origin = f"{type(self).__module__}:{type(self).__qualname__}"
        """The setting or file that named this tool, for errors about duplicate names."""

    @classmethod
    def default(cls, config: ToolConfig | None = None) -> Self:
        """The tool with its own schema and config, `config` laid over it. TypeError for a class without a schema."""
        if cls.default_schema is None:
            raise TypeError(f"expected {cls.__qualname__}.default_schema to be a ToolSchema, got None; set it")
        return cls({**cls.default_config, **(config or {})}, cls.default_schema)

    @property
    def name(self) -> str:
        """The name by which the model and the REST routes call the tool."""
        return self.tool_schema.function.name

    def coerce(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """The arguments, converted before they are checked against the schema; unchanged by default."""
        return arguments

    async def start(self) -> None:
        """Called once per replica, before the first call: load an index, check a sandbox, connect.

        An exception keeps the tool server from starting. Its message says what is missing and the remedy.
        """
        return None

    async def close(self) -> None:
        """Called once per replica, after its last instance was released."""
        return None

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        """Create the state of a trajectory. ToolInputError when a kwarg is missing or wrong.

        Clean up before raising: `release` is called for created instances only.
        """
        return None

    @abstractmethod
    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Run one call. ToolInputError for invalid arguments. Any other exception is the tool's failure."""

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        """The reward of the instance over all its calls."""
        return 0.0

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """Release the state; called once for each created instance, also when it expired."""
        return None


class ToolSource(ABC):
    """A source that discovers its tools at start-up, such as an MCP server."""

    def __init__(self, origin: str) -> None:
        self.origin = origin
        """The setting or file that named this source."""

    @abstractmethod
    async def open(self) -> Sequence[BaseTool]:
        """Called once per replica, before the tools start: connect and list the tools. Errors stop the server."""

    @abstractmethod
    async def close(self) -> None:
        """Called once per replica, after the tools were closed."""


def current_session() -> str | None:
    """Within `create`: the trajectory of the instance, by which the tools of a trajectory share state."""
    return _session.get()


@contextmanager
def session_scope(session_id: str | None) -> Iterator[None]:
    """Sets the result of `current_session` within the block."""
    token = _session.set(session_id)
    try:
        yield
    finally:
        _session.reset(token)
