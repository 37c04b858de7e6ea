"""`calculator`: arithmetic for the model. Stateless."""

from pydantic import JsonValue

from trackway.tools.base import BaseTool, ToolInputError
from trackway.tools.builtin.arithmetic import ArithmeticInputError, calculate
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult


class CalculatorTool(BaseTool):
    """Evaluates an arithmetic expression; an invalid one is the caller's error."""

    stateless = True
    default_schema = ToolSchema(
        function=FunctionSchema(
            name="calculator",
            description="Evaluate an arithmetic expression and return its value.",
            parameters={
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / // % ** and parentheses, for example (84 + 16) / 4",
                    }
                },
                "required": ["expression"],
            },
        )
    )

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """The value as text."""
        try:
            return ToolResult(text=calculate(str(arguments["expression"])))
        except ArithmeticInputError as error:
            raise ToolInputError(str(error)) from None
