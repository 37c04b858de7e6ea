"""The agent service: calls the model, runs its tool calls, has the result scored, and returns trajectories.

To add a loop, subclass `AgentLoop`, decorate it with `@register("name")`, and name its module in `modules`.
"""

from trackway.agent.context import AgentContext
from trackway.agent.episode import Episode
from trackway.agent.loop import AgentLoop, register
from trackway.agent.parser import ToolParser, register_parser
from trackway.agent.sessions.external import ExternalAgent
from trackway.agent.single_turn import SingleTurnAgent
from trackway.agent.tool_agent import ToolAgent
from trackway.agent.toolbox import Toolbox

__all__ = [
    "AgentContext",
    "AgentLoop",
    "Episode",
    "ExternalAgent",
    "SingleTurnAgent",
    "ToolAgent",
    "ToolParser",
    "Toolbox",
    "register",
    "register_parser",
]
