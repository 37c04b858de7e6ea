"""`calc_gsm8k_reward`: compares an answer with the ground truth, as verl v0.7.1's Gsm8kTool does.

Text, schema words, scoring and step reward are verl's (verl/tools/gsm8k_tool.py): an answer is compared with the one
before it, and the last one counts. The state differs: verl's agent loop makes an instance per call, here it lasts for
the trajectory, so a second call that does not improve costs 0.05.
"""

from dataclasses import dataclass

from pydantic import JsonValue

from trackway import gsm8k
from trackway.tools.base import BaseTool, ToolInputError
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

NO_IMPROVEMENT = -0.05
"""Step reward of a call whose answer scores no better than the one before it."""
_MARK = "#### "


@dataclass
class _State:
    ground_truth: str
    last: float = 0.0


class Gsm8kTool(BaseTool):
    """Scores an answer with the flexible method. `create_kwargs.ground_truth` is the truth."""

    default_schema = ToolSchema(
        function=FunctionSchema(
            name="calc_gsm8k_reward",
            description=(
                "A tool for calculating the reward of gsm8k. (1.0 if parsed answer is correct, "
                "0.0 if parsed answer is incorrect or not correctly parsed)"
            ),
            parameters={
                "type": "object",
                "properties": {
                    "answer": {
                        "type": "string",
                        "description": "The model's answer to the GSM8K math problem, must be a digits",
                    }
                },
                "required": ["answer"],
            },
        )
    )

    def __init__(self, config: dict[str, JsonValue], tool_schema: ToolSchema) -> None:
        super().__init__(config, tool_schema)
        self._states: dict[str, _State] = {}

    def coerce(self, arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
        """Converts a number to text: the schema says string, models write 72, and verl accepts it."""
        answer = arguments.get("answer")
        if isinstance(answer, int | float) and not isinstance(answer, bool):
            return {**arguments, "answer": str(answer)}
        return arguments

    async def create(self, instance_id: str, /, **create_kwargs: JsonValue) -> None:
        """Store the ground truth, a string of digits."""
        truth = create_kwargs.get("ground_truth")
        if not isinstance(truth, str):
            raise ToolInputError(
                f"{self.name}: expected create_kwargs.ground_truth to be a string such as '72', got {truth!r}; "
                f"the dataset row gives it under extra_info.tools_kwargs.{self.name}.create_kwargs"
            )
        self._states[instance_id] = _State(truth)

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """Score the answer. The step reward is 0.0 when it beats the answer before it, else -0.05."""
        state = self._states[instance_id]
        answer = str(arguments["answer"])
        marked = answer if answer.startswith(_MARK) else _MARK + answer
        reward = gsm8k.score(marked, state.ground_truth, gsm8k.Method.FLEXIBLE)
        step_reward = 0.0 if reward > state.last else NO_IMPROVEMENT
        state.last = reward
        return ToolResult(text=f"Current parsed {answer=} {reward=}", reward=step_reward)

    async def calc_reward(self, instance_id: str, /, **kwargs: JsonValue) -> float:
        """The score of the last call. 0.0 before the first."""
        return self._states[instance_id].last

    async def release(self, instance_id: str, /, **release_kwargs: JsonValue) -> None:
        """Discard the ground truth and the last score."""
        self._states.pop(instance_id, None)
