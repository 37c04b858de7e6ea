"""A tool whose schema costs a plain validator exponential and quadratic time."""

from pydantic import JsonValue

from trackway.tools import BaseTool, FunctionSchema, ToolResult, ToolSchema


class Costly(BaseTool):
    """Takes a text with a pattern and a list without repetition."""

    default_schema = ToolSchema(
        function=FunctionSchema(
            name="costly",
            description="Costly to validate.",
            parameters={
                "type": "object",
                "properties": {
                    "text": {"type": "string", "pattern": "(a+)+$"},
                    "looking": {"type": "string", "pattern": r"^(?=(a+)+$)(a|a)*\1$"},
                    "values": {"type": "array", "uniqueItems": True},
                },
                "patternProperties": {"^(a+)+$": {}},
            },
        )
    )

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        return ToolResult(text="executed")
