"""`python`: code for the model to run, in an interpreter of its own that nothing gets out of."""

import asyncio
import re

from pydantic import Field, JsonValue

from trackway.tools.base import BaseTool, ToolConfig, ToolLimits
from trackway.tools.sandbox import Interpreter, Launcher, SandboxSettings, launcher_for
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


class PythonSettings(SandboxSettings):
    """The tool's config, beside the limits that every tool has."""

    timeout_s: float = Field(default=20.0, gt=0)
    """Seconds that one call may run, its interpreter's start included; then the interpreter is ended. To be below
    `call_timeout_s`, after which the call is an error and not an observation."""
    stateful: bool = True
    """Whether variables live from call to call of an instance; otherwise each call has a fresh interpreter."""


class PythonTool(BaseTool):
    """Runs Python code, one interpreter for each instance; the last expression's value is shown as in a notebook.

    Whatever the code does is an observation; the metric `succeeded` is 1 when it raised nothing.
    """

    default_schema = ToolSchema(
        function=FunctionSchema(
            name="python",
            description=(
                "Run Python code. Returns what it prints and the value of its last expression. "
                "There is no network; files can be written in the current folder."
            ),
            parameters={
                "type": "object",
                "properties": {"code": {"type": "string", "description": "Python code, of any number of lines"}},
                "required": ["code"],
            },
        )
    )

    def __init__(self, config: ToolConfig, tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        own = {name: value for name, value in config.items() if name not in ToolLimits.model_fields}
        self._settings = PythonSettings.model_validate(own)
        self.stateless = not self._settings.stateful
        self._launcher: Launcher | None = None
        self._interpreters: dict[str, Interpreter] = {}

    async def start(self) -> None:
        """SandboxUnavailableError when code cannot be isolated here."""
        self._launcher = await launcher_for(self._settings)

    async def close(self) -> None:
        """End what still lives."""
        await asyncio.gather(*(self.release(instance_id) for instance_id in [*self._interpreters]))

    def coerce(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Code within a Markdown fence becomes the code alone: models write both."""
        code = arguments.get("code")
        fenced = _FENCED.fullmatch(code) if isinstance(code, str) else None
        return {**arguments, "code": fenced[1]} if fenced else arguments

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Run the code; the interpreter starts with an instance's first call."""
        if self._launcher is None:
            raise RuntimeError("expected start() before the first call; the tool server calls it")
        if instance_id not in self._interpreters:
            self._interpreters[instance_id] = Interpreter(self._launcher)
        try:
            outcome = await self._interpreters[instance_id].run(str(arguments["code"]), self._settings.timeout_s)
        finally:
            if self.stateless:
                await self.release(instance_id)
        return ToolResult(text=outcome.text or "[no output]", metrics={"succeeded": float(outcome.succeeded)})

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """End the instance's interpreter, with all that it started."""
        interpreter = self._interpreters.pop(instance_id, None)
        if interpreter is not None:
            await interpreter.stop()
