"""What `tools.py` needs beside our tool server: a bare FastAPI route, a tool that does nothing, an OTLP receiver."""

from fastapi import FastAPI
from pydantic import BaseModel, JsonValue
from starlette.types import Receive, Scope, Send

from trackway.tools.base import BaseTool
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

bare = FastAPI()


class Call(BaseModel):
    """What an execute call has in its body."""

    arguments: dict[str, JsonValue]
    tool_call_id: str | None = None


@bare.post("/execute")
async def execute(call: Call) -> ToolResult:
    """What a tool server costs that does nothing but its one tool."""
    return ToolResult(text=str(call.arguments["text"]))


class EchoTool(BaseTool):
    """The trivial tool."""

    stateless = True
    default_schema = ToolSchema(
        function=FunctionSchema(
            name="echo",
            description="Say the text again.",
            parameters={"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]},
        )
    )

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """The text."""
        return ToolResult(text=str(arguments["text"]))


async def sink(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes every span and forgets it."""
    while (await receive()).get("more_body", False):
        pass
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
    await send({"type": "http.response.body", "body": b""})
