"""A stateful tool with a reward: the model guesses a number. Each trajectory has its own instance.

TRACKWAY_EXTRA_TOOLS='["guess_number:GuessNumberTool"]' PYTHONPATH=examples/tools \
    uvicorn --factory trackway.tools.app:create_app
"""

from dataclasses import dataclass
from typing import ClassVar

from pydantic import JsonValue

from trackway.tools import BaseTool, FunctionSchema, ToolConfig, ToolInputError, ToolResult, ToolSchema


@dataclass
class _Game:
    secret: int
    guesses: int = 0
    found: bool = False


class GuessNumberTool(BaseTool):
    """Says higher or lower. `create_kwargs.secret` comes from the dataset row; config `penalty` from the settings."""

    default_config: ClassVar[ToolConfig] = {"penalty": 0.1}
    default_schema = ToolSchema(
        function=FunctionSchema(
            name="guess_number",
            description="Guess the secret number between 1 and 100.",
            parameters={
                "type": "object",
                "properties": {"number": {"type": "integer", "minimum": 1, "maximum": 100}},
                "required": ["number"],
            },
        )
    )

    def __init__(self, config: ToolConfig, tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._games: dict[str, _Game] = {}

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        """Once per trajectory, before its first call."""
        secret = create_kwargs.get("secret")
        if not isinstance(secret, int):
            raise ToolInputError(f"guess_number: expected create_kwargs.secret to be an integer, got {secret!r}")
        self._games[instance_id] = _Game(secret)

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """One call; the arguments have been checked against the schema."""
        game, number = self._games[instance_id], int(str(arguments["number"]))
        game.guesses += 1
        game.found = game.found or number == game.secret
        answer = "right" if number == game.secret else "higher" if number < game.secret else "lower"
        return ToolResult(text=answer, metrics={"distance": abs(number - game.secret)})

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        """The reward of the whole trajectory: sooner is better."""
        game = self._games[instance_id]
        penalty = float(str(self.config["penalty"])) * (game.guesses - 1)
        return max(0.0, 1.0 - penalty) if game.found else 0.0

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """Once, at the end of the trajectory or when it was given up."""
        del self._games[instance_id]
