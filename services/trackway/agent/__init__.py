"""The agent service: calls the model, runs its tool calls, has the result scored, and returns trajectories.

To add a loop, subclass `AgentLoop`, decorate it with `@register("name")`, and name its module in `modules`.
"""

from trackway.agent.context import AgentContext
from trackway.agent.episode import Episode
from trackway.agent.loop import AgentLoop, register
from trackway.agent.sessions.external import ExternalAgent
from trackway.agent.tool_agent import SingleTurnAgent, ToolAgent
from trackway.agent.toolbox import Toolbox
from trackway.chat.tool_calls import Parsed, ParsedCall, ToolFormat, register_tool_format

__all__ = [
    "AgentContext",
    "AgentLoop",
    "Episode",
    "ExternalAgent",
    "Parsed",
    "ParsedCall",
    "SingleTurnAgent",
    "ToolAgent",
    "ToolFormat",
    "Toolbox",
    "register",
    "register_tool_format",
]
