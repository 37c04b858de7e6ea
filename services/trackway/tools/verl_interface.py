"""The classes that a tool of verl's imports (verl/tools), with verl's names and fields. verl.py runs such a tool."""

import uuid
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, Field


class ToolResponse(BaseModel):
    """Result of `create` and `execute` for the model. Images and videos become markers in the text."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None

    def is_empty(self) -> bool:
        """Return whether it has nothing."""
        return not (self.text or self.image or self.video)

    def is_text_only(self) -> bool:
        """Return whether it has text and nothing else."""
        return bool(self.text) and not (self.image or self.video)


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter. Further keywords of JSON schema are kept."""

    model_config = ConfigDict(extra="allow")

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function."""

    model_config = ConfigDict(extra="allow")

    type: str = "object"
    properties: dict[str, OpenAIFunctionPropertySchema] = Field(default_factory=dict)
    required: list[str] = Field(default_factory=list)


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    name: str
    description: str = ""
    parameters: OpenAIFunctionParametersSchema = Field(default_factory=OpenAIFunctionParametersSchema)
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool."""

    type: str = "function"
    function: OpenAIFunctionSchema


class _Named(Protocol):
    @property
    def name(self) -> str: ...


class ToolSchemaLike(Protocol):
    """A schema of this module, or one of `trackway.tools`."""

    @property
    def function(self) -> _Named: ...


class BaseTool:
    """Base of verl's tools: `create`, `execute`, `calc_reward`, `release`, each with the id of a tool instance."""

    def __init__(self, config: dict[str, Any], tool_schema: ToolSchemaLike | None = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(
                f"{type(self).__name__}: expected a tool_schema in the YAML file or of the class, got none"
            )
        self.name = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> ToolSchemaLike | None:
        """The schema; a tool without one in its YAML entry overrides this."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create the state of a trajectory. Returns the instance's id."""
        return instance_id or str(uuid.uuid4()), ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Run a call. Returns the response, its reward and its metrics."""
        return ToolResponse(text="Updated the tool state."), 0.0, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """The reward of the state."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release the state."""
