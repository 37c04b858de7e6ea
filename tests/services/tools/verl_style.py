"""Classes of verl's signature, written without verl: its own base class is not installed."""

from dataclasses import dataclass, field
from typing import Any


@dataclass
class Response:
    """As verl's ToolResponse."""

    text: str | None = None
    image: list[object] | None = None
    video: list[object] | None = None


@dataclass
class ScoreTool:
    """As verl v0.7.1's tools: takes `create_kwargs` whole, gives an id of its own, counts calls."""

    config: dict[str, object]
    tool_schema: object
    states: dict[str, dict[str, Any]] = field(default_factory=dict)
    released: list[str] = field(default_factory=list)

    async def create(self, instance_id=None, **kwargs):
        self.states["own"] = {**kwargs, "calls": 0}
        return "own", Response()

    async def execute(self, instance_id, parameters, **kwargs):
        state = self.states[instance_id]
        state["calls"] += 1
        text = f"{parameters} {state} {kwargs} {self.config}"
        return Response(text=text, image=["png"]), 0.5, {"calls": state["calls"], "status": "success", "error": None}

    async def calc_reward(self, instance_id, **kwargs):
        return self.states[instance_id]["calls"]

    async def release(self, instance_id, **kwargs):
        self.released.append(instance_id)
        del self.states[instance_id]


class NamedTool(ScoreTool):
    """As verl's geo3k tool, which names what it takes; has a schema of its own, and gives nothing but a text."""

    def __init__(self, config, tool_schema):
        super().__init__(config, tool_schema or self.get_openai_tool_schema())

    def get_openai_tool_schema(self):
        return {"type": "function", "function": {"name": "named", "parameters": {"type": "object"}}}

    async def create(self, instance_id=None, ground_truth=None):  # pyright: ignore[reportIncompatibleMethodOverride]
        self.states[str(instance_id)] = {"truth": ground_truth}
        return instance_id

    async def execute(self, instance_id, parameters, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return str(self.states[instance_id]["truth"]), None, None

    async def calc_reward(self, instance_id, **kwargs):  # pyright: ignore[reportIncompatibleMethodOverride]
        return ["a list, as verl's search tool"]


class NoTool:
    """Lacks most of it."""

    async def execute(self, instance_id, parameters, **kwargs):
        return "", 0.0, {}
