"""Draws a trial for a terminal: each turn with its tool calls, the reward, and where tokens and time went."""

from collections.abc import Sequence
from pathlib import Path

from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trackway.deploy.runs.trial import Tried
from trackway.system import visible
from trackway.wire.chat import Message
from trackway.wire.trajectory import ToolCallRecord, Trajectory, Turn

_STYLES = {"system": "dim", "user": "cyan", "assistant": "green", "tool": "magenta"}
_ANSWER_CHARS = 40
"""Characters of the last answer in the table of a group."""


def trial_report(tried: Tried, max_response_length: int) -> RenderableType:
    """A single trajectory in full; of several a table, then the best and the worst in full."""
    sample = tried.sample
    names = Text.assemble(
        (f"{_shortened(tried.file)} row {tried.row}", "bold"),
        f"   loop {tried.trajectories[0].agent_name}   data source {sample.data_source}   ground truth "
        f"{_visible(sample.reward_model.ground_truth)}",
    )
    parts: list[RenderableType] = [names, Text(), _conversation(sample.prompt)]
    if len(tried.trajectories) > 1:
        parts += [Text(), _group(tried)]
    for trajectory in _shown_in_full(tried.trajectories):
        title = f"rollout {trajectory.tags.rollout_n}" if len(tried.trajectories) > 1 else ""
        parts += [Text(), Rule(title, align="left", style="dim"), *_in_full(trajectory, max_response_length)]
    return Group(*parts)


def _shortened(file: str) -> str:
    """The path relative to the working folder, if the file is below it."""
    path = Path(file)
    return str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)


def _shown_in_full(trajectories: Sequence[Trajectory]) -> list[Trajectory]:
    """The first failed trajectory, or else the best and the worst by reward, or one if all have the same."""
    failed = [trajectory for trajectory in trajectories if trajectory.error is not None]
    if failed:
        return failed[:1]
    best, worst = max(trajectories, key=_score), min(trajectories, key=_score)
    return [best] if _score(best) == _score(worst) else [best, worst]


def _score(trajectory: Trajectory) -> float:
    return trajectory.reward.score if trajectory.reward is not None else float("-inf")


def _in_full(trajectory: Trajectory, max_response_length: int) -> list[RenderableType]:
    parts: list[RenderableType] = [_turns(trajectory), Text()]
    facts = Table.grid(padding=(0, 2))
    if trajectory.error is not None:
        error = trajectory.error
        facts.add_row(Text("error", "bold red"), Text(f"{error.code.value}: {_visible(error.message)}", "red"))
    if trajectory.reward is not None:
        components = ", ".join(f"{name} {value:g}" for name, value in trajectory.reward.components.items())
        score = Text.assemble((f"{trajectory.reward.score:g}", "bold"), f"   {components}" if components else "")
        facts.add_row(Text("reward", "bold"), score)
    for record in (record for turn in trajectory.turns for record in turn.calls if record.error is not None):
        facts.add_row(Text("failed call", "bold red"), Text(f"{record.tool}: {_visible(record.message)}", "red"))
    turns = len(trajectory.turns)
    facts.add_row(
        Text("end", "bold"),
        f"{trajectory.stop_reason.value} after {turns} turn{'s' * (turns != 1)}{_problems(trajectory)}",
    )
    length, written = len(trajectory.response_ids), sum(trajectory.response_mask)
    facts.add_row(
        Text("tokens", "bold"),
        f"prompt {len(trajectory.prompt_ids)}, response {length} of at most {max_response_length}: model {written}, "
        f"tool results and template {length - written}",
    )
    facts.add_row(Text("seconds", "bold"), _seconds(trajectory))
    return [*parts, facts]


def _problems(trajectory: Trajectory) -> str:
    names = ", ".join(incident.value for incident in trajectory.incidents)
    return f"; incidents: {names}" if names else ""


def _seconds(trajectory: Trajectory) -> str:
    timings, parts = trajectory.timings, trajectory.timings.parts
    rest = max(0.0, timings.total - sum(parts.values()))
    return f"{timings.total:.2f}: " + ", ".join(
        f"{name} {value:.2f}" for name, value in (parts | {"rest": rest}).items()
    )


def _conversation(messages: Sequence[Message]) -> Table:
    table = Table.grid(padding=(0, 2))
    for message in messages:
        table.add_row(_role(message.role), _text(message))
    return table


def _turns(trajectory: Trajectory) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for turn in trajectory.turns:
        records = {record.tool_call_id: record for record in turn.calls}
        for message in turn.messages:
            measured = _measured(turn, message, records)
            table.add_row(_role(message.role), _text(message), Text(measured, "dim"))
    return table if trajectory.turns else Text("no turn: the model wrote nothing", "dim")


def _measured(turn: Turn, message: Message, records: dict[str, ToolCallRecord]) -> str:
    """Cost of the message: tokens and seconds of the model's, seconds and step reward of a call's result."""
    if message.role == "assistant":
        tokens = f"{turn.response_end - turn.response_start} tokens"
        return f"{tokens}, {turn.generate_s:.2f} s" if turn.generate_s else tokens
    record = records.get(message.tool_call_id or "")
    if record is None:
        return ""
    reward = f", step reward {record.reward:g}" if record.reward else ""
    failed = f", {record.error.value}" if record.error else ""
    return f"{record.tool}, {record.seconds:.2f} s{reward}{failed}"


def _role(role: str) -> Text:
    return Text(role, _STYLES.get(role, ""))


def _text(message: Message) -> Text:
    calls = [f"{call.function.name}({call.function.arguments})" for call in message.tool_calls or []]
    content = [str(message.content)] if message.content else []
    return Text(_visible("\n".join([*content, *calls])) or "(empty)")


def _visible(text: str) -> str:
    return visible(text, keep="\n")


def _group(tried: Tried) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="bold")
    for name in ("rollout", "reward", "advantage", "turns", "calls", "tokens", "seconds"):
        table.add_column(name, justify="right")
    table.add_column("end")
    table.add_column("answer", no_wrap=True, overflow="ellipsis")
    for trajectory, advantage in zip(tried.trajectories, tried.advantages, strict=True):
        table.add_row(
            str(trajectory.tags.rollout_n),
            f"{trajectory.reward.score:g}" if trajectory.reward else "none",
            "left out" if advantage is None else f"{advantage:+.2f}",
            str(len(trajectory.turns)),
            str(sum(len(turn.calls) for turn in trajectory.turns)),
            str(len(trajectory.response_ids)),
            f"{trajectory.timings.total:.2f}",
            trajectory.error.code.value if trajectory.error else trajectory.stop_reason.value,
            Text(_answer(trajectory)),
        )
    known = [advantage for advantage in tried.advantages if advantage is not None]
    if not known or any(known):
        return table
    equal = "all rewards are equal, so every advantage is 0: training learns nothing from this row now"
    return Group(table, Text(equal, "yellow"))


def _answer(trajectory: Trajectory) -> str:
    """The last text of the model, on one line."""
    messages = [message for turn in trajectory.turns for message in turn.messages if message.role == "assistant"]
    text = " ".join(str(_text(messages[-1])).split()) if messages else ""
    return text if len(text) <= _ANSWER_CHARS else f"{text[:_ANSWER_CHARS]}..."
