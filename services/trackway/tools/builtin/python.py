"""`python`: runs the model's code in an isolated interpreter."""

import asyncio
import re

from pydantic import Field, JsonValue

from trackway.tools.base import BaseTool, ToolConfig, ToolLimits
from trackway.tools.sandbox import Interpreter, Launcher, SandboxSettings, launcher_for
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

_FENCED = re.compile(r"\s*```(?:python|py)?[ \t]*\n(.*?)\n?```\s*", re.DOTALL)


class PythonSettings(SandboxSettings):
    """The tool's config, in addition to ToolLimits."""

    timeout_s: float = Field(default=20.0, gt=0)
    """Time limit of a call in seconds, including the interpreter's start; then the interpreter is killed. Keep it below
    `call_timeout_s`, after which the call is an error and not an observation."""
    stateful: bool = True
    """True if variables persist between the calls of an instance. Otherwise each call has a new interpreter."""


class PythonTool(BaseTool):
    """Runs Python code, with an interpreter per instance. The value of the last expression is shown as in a notebook.

    All results of the code are observations. The metric `succeeded` is 1 if it raised nothing.
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
        settings = {name: value for name, value in config.items() if name not in ToolLimits.model_fields}
        self._settings = PythonSettings.model_validate(settings)
        self.stateless = not self._settings.stateful
        self._launcher: Launcher | None = None
        self._interpreters: dict[str, Interpreter] = {}

    async def start(self) -> None:
        """Check the sandbox. Raises SandboxUnavailableError when code cannot be isolated here."""
        self._launcher = await launcher_for(self._settings)

    async def close(self) -> None:
        """Stop the remaining interpreters."""
        await asyncio.gather(*(self.release(instance_id) for instance_id in [*self._interpreters]))

    def coerce(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Removes a Markdown fence around the code, which models often write."""
        code = arguments.get("code")
        fenced = _FENCED.fullmatch(code) if isinstance(code, str) else None
        return {**arguments, "code": fenced[1]} if fenced else arguments

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Run the code. The interpreter starts with an instance's first call."""
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
        """Stop the instance's interpreter and all its processes. `close` waits for one whose release was cancelled."""
        interpreter = self._interpreters.get(instance_id)
        if interpreter is not None:
            await interpreter.stop()
            self._interpreters.pop(instance_id, None)
