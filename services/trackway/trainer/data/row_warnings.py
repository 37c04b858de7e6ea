"""Warnings about the rows before a run: messages, or None when there is no problem."""

from collections.abc import Sequence

from trackway.run_config import RunConfig
from trackway.wire.agent import Sample

WITHOUT_TOOLS = "single_turn_agent"
"""The agent loop that offers no tools."""

_MULTI_TURN = "actor_rollout_ref.rollout.multi_turn.enable"
_DEFAULT_LOOP = "actor_rollout_ref.rollout.agent.default_agent_loop"


def agent_name_note(rows: Sequence[Sample], config: RunConfig) -> str | None:
    """The agent loop of rows without `agent_name` and how to change it, or None when every row has one."""
    missing = sum(not row.agent_name for row in rows)
    if not missing:
        return None
    loop, enabled = config.default_agent, config.actor_rollout_ref.rollout.multi_turn.enable
    because = f"{_MULTI_TURN}=true" if enabled else f"{_DEFAULT_LOOP}={loop}"
    known = {
        "tool_agent": f", in several turns with {_tools(config)}",
        "single_turn_agent": ", in one turn without tools",
    }
    change = "" if loop == "tool_agent" else f", or set {_MULTI_TURN}=true to give them tools"
    return (
        f"{missing} of {len(rows)} rows have no agent_name and run as {loop}{known.get(loop, '')} ({because}); "
        f"add the column agent_name to choose another{change}"
    )


def tools_kwargs_note(rows: Sequence[Sample]) -> str | None:
    """The number of rows with `need_tools_kwargs` but without `tools_kwargs`, or None when there are none."""
    without = sum(
        bool(row.extra_info.get("need_tools_kwargs")) and not row.extra_info.get("tools_kwargs") for row in rows
    )
    if not without:
        return None
    return (
        f"{without} of {len(rows)} rows have need_tools_kwargs and no tools_kwargs, so tools such as "
        "calc_gsm8k_reward get no ground truth; add extra_info.tools_kwargs"
    )


def _tools(config: RunConfig) -> str:
    names = config.trackway.tools
    if names is None:
        return "all tools of the tool server"
    return f"the tools {', '.join(names)}" if names else "no tools, as trackway.tools is empty"
