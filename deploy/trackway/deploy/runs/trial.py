"""A trial before any training: the rollouts of one row, with the loop, tools and scorer that a run would use.

trial = Trial(prepare(words, None, "default", settings, trial=True))
findings, rows = trial.check(report)
findings.refuse()
result = trial.run(rows, number=1, n=8, report)

It is drawn for a terminal: each turn with its tool calls, the reward, and where tokens and time went.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import InitVar, dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from pydantic import BaseModel
from rich.console import Group, RenderableType
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from trackway.agent.app import create_app as create_agent
from trackway.agent.settings import AgentSettings
from trackway.clients import AgentClient, Deadline, RewardClient, run
from trackway.clients.http_client import authorization, resolve_token
from trackway.deploy.checks.findings import Findings
from trackway.deploy.checks.run import Subject, check_parts
from trackway.deploy.config import serve_config
from trackway.deploy.deployment.processes import Report
from trackway.deploy.runs.prepare import model_of
from trackway.deploy.serve.direct_port import DirectPort
from trackway.reward.app import create_app as create_reward
from trackway.reward.settings import RewardSettings
from trackway.rollout.app import create_app as create_rollout
from trackway.rollout.settings import RolloutSettings
from trackway.run_config import RunConfig
from trackway.run_config.algorithm import OPTIMAL_BASELINES
from trackway.serving.user_code import add_to_path
from trackway.system import visible
from trackway.system.process import UserError, free_port
from trackway.tools.app import create_app as create_tools
from trackway.tools.settings import ToolsSettings
from trackway.trainer.data.dataset import RowLocation, Rows
from trackway.trainer.loop.from_config import training_template
from trackway.wire.agent import Sample
from trackway.wire.chat import Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Ready
from trackway.wire.trajectory import ToolCallRecord, TraceTarget, Trajectory, Turn

_POLL_S = 0.1


@asynccontextmanager
async def services_here(config: dict[str, Any], model: Path | None, start_s: float) -> AsyncIterator[AgentClient]:
    """A client of the agent service. All services have the settings of the Serve config and this model.

    None for the agent's `chat_model`, which needs no rollout service.

    Errors of the services' own start are raised. UserError when the model is not loaded after `start_s` seconds.
    """
    args = {service: serve_config.args_of(config, service) for service in ("rollout", "agent", "tools", "reward")}
    apps = {
        "tools": create_tools(ToolsSettings(**args["tools"])),
        "reward": create_reward(RewardSettings(**args["reward"])),
    }
    if model is not None:
        rollout = {**args["rollout"], "model_path": model, "weights_url": None}
        apps["rollout"] = create_rollout(RolloutSettings(**rollout))
    async with AsyncExitStack() as stack:
        # The agent's requests reach the apps without a port.
        mounts = {f"http://{name}": httpx.ASGITransport(app) for name, app in apps.items()}
        http = await stack.enter_async_context(httpx.AsyncClient(mounts=mounts, trust_env=False))
        urls = {f"{name}_url": f"http://{name}" for name in apps}
        settings = AgentSettings(**{**args["agent"], "model_path": str(model or ""), **urls})
        port = free_port()
        agent = create_agent(settings.model_copy(update={"agent_url": f"http://127.0.0.1:{port}"}), http)
        if settings.external or settings.external_agents:  # their programs reach the model at a port
            DirectPort(agent, "127.0.0.1", living=lambda: 0, drain_s=0, port=port)
        for app in (*apps.values(), agent):
            await stack.enter_async_context(app.router.lifespan_context(app))
        if model is not None:
            await _until_ready(http, start_s)
        transport = httpx.ASGITransport(agent)
        yield AgentClient(
            "http://agent", await stack.enter_async_context(httpx.AsyncClient(transport=transport, trust_env=False))
        )


@asynccontextmanager
async def reward_here(config: dict[str, Any]) -> AsyncIterator[RewardClient]:
    """A client of a reward service with the settings of the Serve config, which starts no model."""
    app = create_reward(RewardSettings(**serve_config.args_of(config, "reward")))
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), trust_env=False) as http,
    ):
        yield RewardClient("http://reward", http)


async def _until_ready(http: httpx.AsyncClient, start_s: float) -> None:
    deadline = time.monotonic() + start_s
    while not (ready := await _ready(http)).ready:
        if ready.broken or time.monotonic() > deadline:
            raise UserError(f"the model: expected to be ready within {start_s:.0f} s, got: {ready.reason}")
        await asyncio.sleep(_POLL_S)


async def _ready(http: httpx.AsyncClient) -> Ready:
    """True if the rollout service has loaded the model. The other services are ready once they have started."""
    answer = await http.get("http://rollout/ready", headers=authorization(resolve_token()))
    return Ready.model_validate_json(answer.content)


RUN = "try"
"""Name of the run in the ids of the trajectories."""


class Tried(BaseModel):
    """The rollouts of one row."""

    file: str
    row: int
    """Number of the row in its file. The first is 1."""
    sample: Sample
    trajectories: list[Trajectory]
    """Trajectories by rollout number."""
    advantages: list[float | None]
    """Advantage of each trajectory, or None for those that a training step would leave out."""


@dataclass
class Trial:
    """A configuration and its services: those that run already, or those started in this process.

    Raises UserError without rows.
    """

    subject: Subject
    rows: InitVar[Path | None] = None
    """Replaces `data.train_files`."""
    policy: str | None = None
    """Policy of the running services that generates. None is their default one."""

    def __post_init__(self, rows: Path | None) -> None:
        if rows is not None:
            self.subject.config = self.subject.config.with_values({"data.train_files": [str(rows.absolute())]})
        if not self.subject.config.data.train_files:
            raise UserError("expected a file of rows, got none; name one: trackway try rows.jsonl")
        if self.policy is not None and self.subject.deployment is None:
            raise UserError(
                f"--policy {self.policy}: expected running services, got none; start them with `trackway up`"
            )

    def check(self, report: Report) -> tuple[Findings, Rows | None]:
        """Faults of the rows, tools, scorers and loops; and the rows, None when they cannot be read."""
        findings, used = check_parts(self.subject, report)
        return findings, used.get("data.train_files")

    def run(self, rows: Rows, number: int, n: int, report: Report) -> Tried:
        """The n rollouts of a row, which counts from 1. Raises UserError and TrackwayError."""
        sample, location = _row(rows, number)
        trajectories = run(self._rollouts(sample, n, report))
        return Tried(
            file=location.file,
            row=location.number,
            sample=sample,
            trajectories=trajectories,
            advantages=advantages_of(trajectories, self.subject.config),
        )

    async def _rollouts(self, sample: Sample, n: int, report: Report) -> list[Trajectory]:
        async with agent_of(self.subject, report) as client:
            return await self._collected(client, sample, n, report)

    async def _collected(self, client: AgentClient, sample: Sample, n: int, report: Report) -> list[Trajectory]:
        config = self.subject.config
        template = replace(training_template(config, RUN, TraceTarget()), n=n, policy=self.policy)
        request = template.group(sample, step=0, min_weight_version=0, trace=False)
        name = "trajectory" if n == 1 else f"{n} trajectories"
        report(name, "running")
        deadline = Deadline.after(config.trackway.group_timeout_s)
        trajectories = [trajectory async for trajectory in client.group(request, deadline)]
        if len(trajectories) < n:
            message = f"expected {n} trajectories, got {len(trajectories)}; the agent service ended the stream early"
            raise TrackwayError(ErrorCode.UNAVAILABLE, message)
        report(name, "ready")
        return sorted(trajectories, key=lambda trajectory: trajectory.tags.rollout_n)


@asynccontextmanager
async def agent_of(subject: Subject, report: Report) -> AsyncIterator[AgentClient]:
    """A client of the running agent service, or of one that is started in this process with all that it needs.

    An error of the block is raised without the groups of the services' tasks.
    """
    deployment, services = subject.deployment, subject.services
    try:
        if deployment is not None:
            yield AgentClient(deployment.url("agent"))
            return
        assert services is not None
        report("model and services", "starting")
        start_s = subject.settings.start_timeout_s
        speaks_messages = serve_config.args_of(services.serve_config, "agent").get("chat_model")
        model = None if speaks_messages else model_of(subject.config)
        async with services_here(services.serve_config, model, start_s) as client:
            report("model and services", "ready")
            yield client
    except ExceptionGroup as group:
        error: Exception = group
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        raise error from None


def _row(rows: Rows, number: int) -> tuple[Sample, RowLocation]:
    for sample, location in zip(rows.samples, rows.locations, strict=True):
        if location.number == number:
            return sample, location
    last = max(location.number for location in rows.locations)
    why = "its prompt is longer than data.max_prompt_length" if number < last else f"the last row is {last}"
    raise UserError(f"--row: expected the number of a row, counted from 1, got {number}: {why}; give another")


def advantages_of(trajectories: list[Trajectory], config: RunConfig) -> list[float | None]:
    """The advantage of each trajectory within the group, or None for one that a training step would leave out.

    What an estimator takes from the batch is taken from the group. One that needs more, such as the model's
    distribution, a greedy rollout or a value model, is replaced by rloo, whose baseline is the group's mean, and there
    is no KL penalty. Raises ValueError when an own estimator cannot be loaded.
    """
    import torch

    from trackway.learner.advantages import AdvantageInputs, estimate, per_trajectory, token_rewards
    from trackway.learner.batch import placed_scores
    from trackway.learner.filtering import TrainStatus, filter_trajectories

    batch = filter_trajectories(trajectories, version=0, max_staleness=None)
    rewards = [trajectory.reward for trajectory in batch.used if trajectory.reward is not None]
    if not rewards:
        return [None] * len(trajectories)
    masks = [[bit for row in trajectory.rows for bit in row.response_mask] for trajectory in batch.used]
    longest = max(map(len, masks))
    mask = torch.tensor([[*bits, *[0] * (longest - len(bits))] for bits in masks]).bool()
    inputs = AdvantageInputs(
        rewards=token_rewards([reward.score for reward in rewards], mask, placed_scores(batch.used, longest)),
        mask=mask,
        groups=["group"] * len(rewards),
        components=[{"score": reward.score, **reward.components} for reward in rewards],
    )
    algorithm = config.algorithm
    if algorithm.adv_estimator in (*OPTIMAL_BASELINES, "remax", "gae"):
        algorithm = algorithm.with_values({"adv_estimator": "rloo"})
    if ":" in algorithm.adv_estimator and config.trackway.code_path:
        add_to_path(Path(config.trackway.code_path))
    values = iter(per_trajectory(estimate(algorithm, inputs), mask).tolist())
    return [next(values) if status is TrainStatus.USED else None for status in batch.statuses]


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
