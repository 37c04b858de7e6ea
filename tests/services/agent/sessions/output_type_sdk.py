# /// script
# requires-python = ">=3.11"
# dependencies = ["openai-agents==0.24.0"]
# ///
"""An agent of the OpenAI Agents SDK with a tool and an `output_type`: it sends a JSON format beside its tools."""

from agents import Agent, Runner, function_tool
from pydantic import BaseModel


class Count(BaseModel):
    """The answer."""

    count: int


@function_tool
def calculator(expression: str) -> str:
    """The value of an arithmetic expression."""
    return str(sum(map(int, expression.split("+"))))


agent = Agent(name="counter", model="policy", tools=[calculator], output_type=Count)
print(repr(Runner.run_sync(agent, "9+9?", max_turns=3).final_output))
