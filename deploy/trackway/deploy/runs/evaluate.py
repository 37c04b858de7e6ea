"""An evaluation of a model on rows: its rollouts, with the loop, tools and scorer that a run would use.

prepared = prepare("tiny-demo", Options(rows=Path("test.jsonl")), overrides, None, "default", outputs)
findings, rows = prepared.check(report)
findings.refuse()
evaluation = prepared.run(rows, report, progress)
"""

import asyncio
import itertools
import os
import shutil
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from trackway.agent.loop import agent_loop, agents
from trackway.agent.models import ChatModel
from trackway.agent.toolbox import tool_facts
from trackway.chat.tokens import ChatTokens
from trackway.clients import CallPolicy, Deadline, RewardClient, run
from trackway.clients.retry import ForeignServerError
from trackway.deploy.checks.findings import Findings
from trackway.deploy.checks.run import Subject, check_parts
from trackway.deploy.config import serve_config
from trackway.deploy.config.services_for_run import gpus_here, services_for
from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment, recorded
from trackway.deploy.local.settings import UpSettings
from trackway.deploy.runs.prepare import configured
from trackway.deploy.runs.trial import agent_of, reward_here
from trackway.evaluation.store import EvaluationStore
from trackway.evaluation.summary import Evaluation
from trackway.run_config import RunConfig, resolve
from trackway.run_config.compose import given, leaves
from trackway.system.process import UserError
from trackway.tracing import TracingSettings
from trackway.tracing.export.backends import experiment_by_name
from trackway.trainer.data.dataset import Rows
from trackway.trainer.loop.build_traces import LEDGER
from trackway.trainer.loop.from_config import retry_policy, trace_target, training_template
from trackway.trainer.loop.rollout_client import GroupTemplate, Rollouts
from trackway.trainer.run_state.checkpoint import PREFIX, find_all, find_latest
from trackway.trainer.run_state.export import export_checkpoint
from trackway.trainer.run_state.folder import RunFolder, outputs_folders, run_folders
from trackway.trainer.traces.run import DailyTraceBytes, TraceBudget
from trackway.wire.agent import Sample
from trackway.wire.base import checked_run_name
from trackway.wire.chat import ChatModelSettings, Message
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.reward import ScoreRequest
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Trajectory

TextOf = Callable[[list[int]], Awaitable[str]]


async def score_request(trajectory: Trajectory, sample: Sample, text_of: TextOf | None) -> ScoreRequest:
    """The request that the agent service sent for a rollout of this row. `text_of` leaves special tokens out.

    It may be None for a model that returned no token ids.
    """
    rows = trajectory.rows
    written = [row.response_ids[turn.response_start : turn.response_end] for row in rows for turn in row.turns]
    if text_of is None:
        turns = [turn.messages[0].content for turn in trajectory.turns]
    else:
        turns = [await text_of(ids) for ids in written]
    components = {} if trajectory.reward is None else trajectory.reward.components
    tool_rewards = {name.removeprefix("tool/"): value for name, value in components.items() if name.startswith("tool/")}
    records = [call for row in rows for turn in row.turns for call in turn.calls]
    said = [message for turn in trajectory.turns for message in turn.messages]
    return ScoreRequest(
        data_source=sample.data_source,
        solution_str="".join(turns),
        ground_truth=sample.reward_model.ground_truth,
        trajectory_id=trajectory.id,
        messages=[*trajectory.prompt_messages, *said],
        extra_info={
            **sample.extra_info,
            "tool_rewards": list(trajectory.tool_rewards),
            **tool_facts(records, tool_rewards),
            "num_turns": trajectory.num_turns,
            "turns": [*turns],
        },
    )


RUNNING = "running"
"""The model that the running services have."""
SCORES_AT_ONCE = 64
MLFLOW_S = 60.0
"""Longest wait until MLflow has the result."""
_MODEL = "actor_rollout_ref.model"
_QUESTION = CallPolicy.question(20.0, attempts=2)
_FIRST_ANSWER = CallPolicy.question(120.0)
"""For a server that loads the model on its first request."""
_SHOWN_MODELS = 20
_WHOLE_MODEL: dict[str, object] = {f"{_MODEL}.lora_rank": 0, f"{_MODEL}.lora_adapter_path": None}
_ONE_ENGINE: dict[str, object] = {"trainer.n_gpus_per_node": None, "trainer.nnodes": None, "data.val_files": []}

Progress = Callable[[Sequence[Trajectory], int], None]
"""Gets the rollouts of another row, and the number of rows that are left."""


@dataclass(frozen=True)
class Options:
    """Choices of the command line. None keeps what the configuration has."""

    rows: Path | None = None
    n: int = 1
    limit: int | None = None
    temperature: float | None = None
    pass_above: float = 0.0
    step: int | None = None
    name: str | None = None
    model: str | None = None
    """Name of the model at a URL."""
    api_key_env: str | None = None
    """Environment variable with the key of the server at a URL."""
    no_seed: bool = False
    """Send no seed to a URL."""
    policy: str | None = None
    """Policy of the running services, instead of their default one."""


@dataclass(frozen=True)
class EvaluationRun:
    """An evaluation and what it needs, before anything is started."""

    store: EvaluationStore
    evaluation: Evaluation
    subject: Subject

    def check(self, report: Report) -> tuple[Findings, Rows | None]:
        """Faults of the rows, tools, scorers and loops; and the rows, None when they cannot be read."""
        findings, used = check_parts(self.subject, report)
        rows = used.get("data.train_files")
        if rows is not None and self.evaluation.endpoint is not None:
            findings.wrong += _need_tokens(rows.samples[: self.evaluation.rows or None], self.subject.config)
        return findings, rows

    def run(self, rows: Rows, report: Report, progress: Progress) -> Evaluation:
        """All rollouts that are not stored yet, and the summary. Raises UserError, TrackwayError, StorageError.

        What has ended is kept whenever this ends.
        """
        samples = rows.samples[: self.evaluation.rows or None]
        if not self.store.exists:
            self.store.begin(
                self.evaluation.model_copy(update={"rows": len(samples)}), self.subject.config, self.subject.tools
            )
        done, config = self.store.done(), self.subject.config
        left = [sample for sample in samples if sample.index not in done]
        budget = TraceBudget(DailyTraceBytes(self.store.path.parent / LEDGER), config.trackway.trace_bytes_per_day)
        wanted = min(config.traced_validation, len(samples)) if self._can_trace else 0
        prompts = budget.prompts(wanted, self.evaluation.n)
        traced = {sample.index for sample in samples[:prompts]}
        exported = self.store.path / "model"
        try:
            if left:
                run(self._collect(self._with_model(exported, report), left, traced, budget, report, progress))
            evaluation = self.store.finish()
        finally:
            shutil.rmtree(exported, ignore_errors=True)
        if uri := self.mlflow_uri:
            report("MLflow", "sending")
            try:
                self.store.send(uri, MLFLOW_S)
                report("MLflow", "sent")
            except TrackwayError as error:  # the result is on disk
                report(f"MLflow: {error.message}", "with problems")
        return evaluation

    @property
    def _can_trace(self) -> bool:
        """Return whether the services reach a trace backend; of running ones it is not known."""
        if self.subject.services is None:
            return True
        args = serve_config.args_of(self.subject.services.serve_config, "agent")
        settings = TracingSettings.model_validate(args.get("tracing", {}))
        backends = self.subject.config.actor_rollout_ref.rollout.trace.backend or settings.default_backends
        return not {*backends}.isdisjoint(settings.usable)

    @property
    def mlflow_uri(self) -> str | None:
        """Address of the MLflow that gets the result, or None without a known address."""
        deployment = self.subject.deployment
        of_services = deployment.mlflow_uri if deployment else None
        return self.subject.config.trackway.mlflow_uri or of_services or os.environ.get("MLFLOW_TRACKING_URI")

    def _with_model(self, exported: Path, report: Report) -> Subject:
        """The subject that serves the checkpoint."""
        checkpoint = self.evaluation.checkpoint
        if checkpoint is None:
            return self.subject
        report("checkpoint", "loading")
        shutil.rmtree(exported, ignore_errors=True)
        export_checkpoint(RunFolder(checkpoint.parent.parent), exported, _step_of(checkpoint), merge=True)
        report("checkpoint", "ready")
        config = self.subject.config.with_values({f"{_MODEL}.path": str(exported), **_WHOLE_MODEL})
        return replace(self.subject, config=config)

    async def _collect(
        self,
        subject: Subject,
        samples: Sequence[Sample],
        traced: set[int | str],
        budget: TraceBudget,
        report: Report,
        progress: Progress,
    ) -> None:
        config, left = subject.config, len(samples)
        async with agent_of(subject, report) as client:
            rollouts = Rollouts(client, self._template(config), retry_policy(config))

            async def collect(sample: Sample) -> None:
                nonlocal left
                group = await rollouts.group(sample, 0, 0, trace=sample.index in traced)
                self.store.add(group)
                kept = [trajectory.trace_bytes for trajectory in group if trajectory.trace_id is not None]
                budget.spend(sum(kept), len(kept))
                left -= 1
                progress(group, left)

            tasks = [asyncio.create_task(collect(sample)) for sample in samples]
            try:
                await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()

    def _template(self, config: RunConfig) -> GroupTemplate:
        target = trace_target(config, experiment_by_name(config.trace_project))
        template = training_template(config, self.evaluation.name, target)
        sampling = template.sampling_params.model_copy(update={"temperature": self.evaluation.temperature})
        chosen = {"n": self.evaluation.n, "sampling_params": sampling, "policy": self.evaluation.policy}
        return replace(template, validation=True, **chosen)


def prepare(
    what: str, options: Options, overrides: list[str], config: Path | None, config_name: str, outputs: Path
) -> EvaluationRun:
    """The evaluation of a command line; starts nothing.

    what: a run, a checkpoint, a folder of a model, an id on the Hugging Face Hub, `running`, or the URL of a server
    with OpenAI's chat completions, whose models are read. The evaluation of a run is written to the
    same outputs folder.
    Raises TrackwayError and UserError for an invalid command line.
    """
    running = recorded(outputs) if what == RUNNING else None
    if options.policy is not None and what != RUNNING:
        raise UserError(f"--policy {options.policy}: expected {RUNNING!r} to evaluate, got {what!r}; leave it out")
    if what == RUNNING and running is None:
        raise UserError(f"expected running services for {outputs}, got none; start them with `trackway up`")
    endpoint = _endpoint(what, options)
    source = None if endpoint else _source(what, options.step, outputs)
    if endpoint is not None:
        used = configured(overrides, config, config_name).with_values({f"{_MODEL}.path": endpoint.model})
    elif source is not None:
        own = source.run.config()
        if own.is_supervised:  # it has neither a loop nor a reward
            used = configured(overrides, config, config_name).with_values({_MODEL: own.actor_rollout_ref.model})
        elif config is not None or config_name != "default":
            raise UserError(f"--config: expected none with run {what!r}, which has its own; give its keys as key=value")
        else:
            used = resolve({**leaves(own.model_dump(mode="json")), **given(overrides)}) if overrides else own
        outputs = source.run.path.parent
    else:
        _require_model(what, outputs)
        path = [] if what == RUNNING else [f"{_MODEL}.path={what}"]
        elsewhere = running is not None and running.attached  # the rows are read here
        used = configured([*overrides, *path], config, config_name, running, trial=elsewhere)
        if used.actor_rollout_ref.model.path is None:
            used = used.with_values({f"{_MODEL}.path": RUNNING})
    files = [str(options.rows.absolute())] if options.rows else [*used.data.val_files]
    if not files:
        raise UserError("expected a file of rows, got none; name one: --data rows.jsonl")
    model = endpoint.model if endpoint else what
    short = source.name if source else (options.policy or Path(model).name).replace(":", "-")
    name = options.name or _numbered(f"eval-{short}", outputs)
    evaluation = Evaluation(
        name=checked_run_name(name),
        model=source.name if source else model,
        checkpoint=source and source.checkpoint,
        endpoint=endpoint,
        policy=options.policy,
        files=files,
        rows=options.limit or 0,
        n=options.n,
        temperature=used.actor_rollout_ref.rollout.temperature if options.temperature is None else options.temperature,
        pass_above=options.pass_above,
    )
    return _prepared(evaluation, used, running, outputs)


def resumed(name: str, outputs: Path) -> EvaluationRun:
    """An evaluation that was cut off, with its own settings. TrackwayError(NOT_FOUND) when there is none."""
    store = EvaluationStore.find(outputs, name)
    evaluation, outputs = store.evaluation(), store.path.parent
    if store.finished:
        raise UserError(f"expected an evaluation that was cut off, got {name!r}, which is finished; give another --run")
    if (endpoint := evaluation.endpoint) is not None:
        keys = {"model": endpoint.model, "api_key_env": endpoint.api_key_env, "no_seed": not endpoint.sends_seed}
        _endpoint(endpoint.base_url, Options(temperature=evaluation.temperature, **keys))
    running = recorded(outputs) if evaluation.model == RUNNING else None
    return _prepared(evaluation, store.config(), running, outputs)


def rescored(name: str, overrides: list[str], target: str | None, outputs: Path, report: Report) -> Evaluation:
    """Score the rollouts of an evaluation again, with its configuration and the overrides. No model runs."""
    store = EvaluationStore.find(outputs, name)
    before, config, outputs = store.evaluation(), store.config(), store.path.parent
    if overrides:
        config = resolve({**leaves(config.model_dump(mode="json")), **given(overrides)})
    new_name = checked_run_name(target or _numbered(f"{name}-rescored", outputs))
    named = before.model_copy(update={"name": new_name, "summary": None, "data_sources": {}})
    prepared = _prepared(named, config, None, outputs)
    findings, rows = prepared.check(report)
    findings.refuse()
    assert rows is not None
    samples = {sample.index: sample for sample in rows.samples}
    assert prepared.subject.services is not None
    served, messages = prepared.subject.services.serve_config, before.endpoint is not None
    scores = run(_scored(store.trajectories(), samples, served, config, messages=messages))
    prepared.store.begin(named, config, RunFolder(store.path).tools())
    prepared.store.add(scores)
    return prepared.store.finish()


async def _scored(
    trajectories: Sequence[Trajectory],
    samples: dict[int | str, Sample],
    services: dict,
    config: RunConfig,
    *,
    messages: bool,
) -> list[Trajectory]:
    path = config.actor_rollout_ref.model.path
    if not messages and (path is None or path == RUNNING):
        raise UserError(f"{_MODEL}.path: expected the model, for its tokenizer, got none; add {_MODEL}.path=FOLDER")
    text_of = None if messages else ChatTokens.load(str(path)).plain_text
    slots = asyncio.Semaphore(SCORES_AT_ONCE)

    async def scored(trajectory: Trajectory, client: RewardClient) -> Trajectory:
        sample = samples.get(trajectory.tags.sample_index)
        if trajectory.error is not None or sample is None:
            return trajectory
        async with slots:
            request = await score_request(trajectory, sample, text_of)
            reward = await client.score(request, deadline=Deadline.after(config.trackway.group_timeout_s))
        old = {} if trajectory.reward is None else trajectory.reward.components
        tools = {key: value for key, value in old.items() if key.startswith("tool/")}
        components = {**tools, **reward.components}
        return trajectory.model_copy(update={"reward": reward.model_copy(update={"components": components})})

    async with reward_here(services) as client:
        return await asyncio.gather(*(scored(trajectory, client) for trajectory in trajectories))


def _prepared(evaluation: Evaluation, config: RunConfig, running: Deployment | None, outputs: Path) -> EvaluationRun:
    names = {
        "trainer.experiment_name": evaluation.name,
        "actor_rollout_ref.rollout.trace.experiment_name": None,
        "data.train_files": evaluation.files,
    }
    used = config.with_values({**_ONE_ENGINE, **names})
    settings = UpSettings.read(outputs=outputs)
    services = None if running else services_for(used, gpus_here(), serve_config.load(settings.config))
    if services and evaluation.endpoint:
        services.give("agent", {"chat_model": evaluation.endpoint.model_dump()})
    if services and used.trackway.mlflow_uri:
        for service in ("agent", "rollout", "tools", "reward"):
            tracing = serve_config.args_of(services.serve_config, service).get("tracing", {})
            services.give(service, {"tracing": {**tracing, "mlflow_uri": used.trackway.mlflow_uri}})
    subject = Subject(services.config if services else used, services, running, settings)
    return EvaluationRun(EvaluationStore(outputs.resolve() / evaluation.name), evaluation, subject)


def _endpoint(what: str, options: Options) -> ChatModelSettings | None:
    """The server and the model at a URL, or None for anything else. Raises UserError and TrackwayError.

    A model that the server does not list is asked for a few tokens, since some servers list none.
    """
    if not what.startswith(("http://", "https://")):
        if options.model or options.api_key_env or options.no_seed:
            message = f"--model, --api-key-env and --no-seed: expected a URL to evaluate, got {what!r}; leave them out"
            raise UserError(message)
        return None
    try:
        endpoint = ChatModelSettings(
            base_url=what,
            model=options.model or "any",
            api_key_env=options.api_key_env,
            sends_seed=not options.no_seed,
        )
    except ValidationError as error:  # the value may be the key itself
        raise UserError(
            "expected https://HOST/v1 without a user, and in --api-key-env the name of a variable, got others; export "
            "the key and give the variable's name"
        ) from error
    served: list[str] = []
    try:
        served = run(ChatModel(endpoint, _QUESTION).models())
    except TrackwayError as error:
        gone = error.code is ErrorCode.UNAVAILABLE and not isinstance(error.__cause__, ForeignServerError)
        if error.code in (ErrorCode.UNAUTHORIZED, ErrorCode.FORBIDDEN) or gone:
            raise
        if options.model is None:
            message = f"expected a list of models at {what}/models, got none; name the model with --model"
            raise UserError(message) from error
    if options.model is None and len(served) == 1:
        return endpoint.model_copy(update={"model": served[0]})
    if options.model in served:
        return endpoint
    names = ", ".join(sorted(served)[:_SHOWN_MODELS]) or "none"
    refused = f"--model: expected a model of {what} ({names}), got {options.model}; name one of them"
    if options.model is None:
        raise UserError(refused)
    params = SamplingParams(temperature=1.0 if options.temperature is None else options.temperature, max_tokens=16)
    hello = [Message(role="user", content="Hello")]
    try:
        run(ChatModel(endpoint, _FIRST_ANSWER).answer(hello, (), params, Deadline.after(_FIRST_ANSWER.total_s)))
    except TrackwayError as error:
        if error.code is not ErrorCode.MODEL_NOT_FOUND or not served:
            raise
        raise UserError(refused) from error
    return endpoint


def _need_tokens(samples: Sequence[Sample], config: RunConfig) -> list[str]:
    """Faults of rows and limits that need the token ids of a model, which a server with messages does not return."""
    known = {sample.agent_name or config.default_agent for sample in samples} & {loop.name for loop in agents()}
    wrong = [name for name in sorted(known) if not agent_loop(name).speaks_messages]
    expected = "agent_name: expected single_turn_agent, tool_agent, a subclass or an environment for a URL, got"
    faults = [f"{expected} {name}, which needs token ids; evaluate a model's folder" for name in wrong]
    if config.trackway.max_tool_response_tokens is not None:
        key = "trackway.max_tool_response_tokens"
        faults.append(
            f"{key}: expected null for a URL, whose tokens are unknown; use multi_turn.max_tool_response_length"
        )
    return faults


class _Source(NamedTuple):
    """A run whose model is evaluated."""

    run: RunFolder
    checkpoint: Path | None
    """None for the model that it started from."""

    @property
    def name(self) -> str:
        """Run and step, `tiny-demo-8`."""
        return f"{self.run.name}-{_step_of(self.checkpoint) if self.checkpoint else 0}"


def _source(what: str, step: int | None, outputs: Path) -> _Source | None:
    """The run and the checkpoint that are meant, or None when `what` is a model."""
    named = Path(what).absolute()
    if named.name.startswith(PREFIX) and named.is_dir():
        return _Source(RunFolder(named.parent.parent), named)
    runs = [RunFolder(folder.resolve() / what) for folder in outputs_folders(outputs)]
    run_folder = next((folder for folder in runs if what != RUNNING and folder.exists), None)
    if run_folder is None or step == 0:
        return run_folder and _Source(run_folder, None)
    newest = find_latest(run_folder.checkpoints)
    checkpoint = newest if step is None else run_folder.checkpoints / f"{PREFIX}{step}"
    if checkpoint is None or not checkpoint.is_dir():
        steps = ", ".join(str(_step_of(path)) for path in reversed(find_all(run_folder.checkpoints))) or "none"
        wanted = "a checkpoint" if step is None else f"a checkpoint of step {step}"
        raise UserError(
            f"expected {wanted} of run {what!r}, got {steps}; give another --step (0 is the model that it started "
            "from), or train with trainer.save_freq"
        )
    return _Source(run_folder, checkpoint)


def _require_model(what: str, outputs: Path) -> None:
    """Raise UserError for a name that is neither a folder nor an id on the Hub, whose ids have an owner."""
    if what == RUNNING or "/" in what or Path(what).is_dir():
        return
    names = ", ".join(run.name for folder in outputs_folders(outputs) for run in run_folders(folder)) or "none"
    raise UserError(
        f"expected a run ({names}), a checkpoint, a model's folder or Hub id, a URL, or {RUNNING!r}, got "
        f"{what!r}; give one, or another --outputs"
    )


def _step_of(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def _numbered(name: str, outputs: Path) -> str:
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(free for free in names if not (outputs / free).exists())
