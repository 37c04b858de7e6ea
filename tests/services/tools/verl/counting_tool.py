"""A tool of our own in the shape of verl's published ones: it imports verl's base class, and verl is not installed."""

# pyright: reportMissingImports=false, reportUntypedBaseClass=false

from typing import Any

from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op


class CountingTool(BaseTool):
    """Counts the calls of a trajectory, from `start` of the row."""

    def __init__(self, config: dict[str, Any], tool_schema: OpenAIFunctionToolSchema) -> None:
        super().__init__(config, tool_schema)
        self.counts: dict[str, int] = {}

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        schema = {"type": "function", "function": {"name": "count", "description": "Counts.", "parameters": {}}}
        return OpenAIFunctionToolSchema.model_validate(schema)

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        own_id, response = await super().create(instance_id)
        self.counts[own_id] = kwargs.get("create_kwargs", {}).get("start", 0)
        return own_id, response

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        self.counts[instance_id] += self.config["step"]
        return ToolResponse(text=f"{self.counts[instance_id]} of {self.name}"), 0.5, {"count": self.counts[instance_id]}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        return float(self.counts[instance_id])

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        del self.counts[instance_id]
