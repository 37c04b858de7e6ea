"""Checks of a run before its first step, with all problems at once.

checked = check_run(subject, load=True, report=board.report)
checked.findings.refuse()

With `load=False` (a dry run) the checks read files and query running services. Nothing is started, downloaded or
written. With `load=True` they also load the tokenizer, every prompt, agent loops, scorers and tools.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import JsonValue, ValidationError

from trackway.chat.tokenizer import template_support
from trackway.chat.tool_formats import tool_format
from trackway.clients import ServiceClient, TrainerClient, run
from trackway.deploy.checks.findings import Findings
from trackway.deploy.checks.gpu_memory import GpuMemory, gpu_memory
from trackway.deploy.checks.model import tokenizer_here
from trackway.deploy.checks.rows import MEASURED_ROWS, RowsHere
from trackway.deploy.config import serve_config
from trackway.deploy.config.code_versions import changed_since_start
from trackway.deploy.config.serve_config import check_engine_python
from trackway.deploy.config.services_for_run import (
    Decision,
    RunServices,
    decided_already,
    gpu_bytes,
    gpus_here,
    too_many_nodes,
)
from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi, ray_token
from trackway.deploy.local import preflight
from trackway.deploy.local.access import check_access, host_of
from trackway.deploy.local.settings import UpSettings
from trackway.reward.models import REWARD_MODEL
from trackway.run_config import RunConfig, UnsupportedKey
from trackway.serving.user_code import described, run_user_code
from trackway.system.process import UserError
from trackway.tools.base import BaseTool, ToolSource
from trackway.tools.core.server import ToolRegistry
from trackway.tracing import TracingSettings
from trackway.trainer.data.dataset import Rows
from trackway.trainer.data.name_check import CHECK_POLICY, Served, ask_services, unserved
from trackway.trainer.data.own_code import SERVICES, loaded_code, not_loaded
from trackway.trainer.delivery import missing_for_loggers
from trackway.trainer.loop.forecast import Forecast, forecast
from trackway.trainer.run_state.checkpoint import check_storage
from trackway.trainer.service_urls import ServiceUrls
from trackway.trainer.supervisor.manager import check_adapter, runnable
from trackway.trainer.supervisor.sharing import ask_engines, check_place, check_weights, policy_of
from trackway.trainer.traces.preflight import unusable, without_entity
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.service import Health
from trackway.wire.trainer import ENDED
from trackway.wire.trajectory import TraceBackend

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


T = TypeVar("T")

START_S = 60.0
"""Longest wait for one tool, or for a source of tools such as an MCP server, to start."""


def offered_by(config: dict[str, Any], findings: Findings, start: bool) -> Served:
    """The agents, scorers and tools of a Serve config. Load errors are added to the findings.

    With `start`, tools and MCP servers are started as the tool server starts them, and closed again. Without it, the
    tools of MCP servers are unknown.
    """
    agents = _loaded("agent loops", findings, lambda: _agents(serve_config.args_of(config, "agent")))
    sources = _loaded("scorers", findings, lambda: _data_sources(serve_config.args_of(config, "reward")))
    known_agents = None if agents is None else frozenset(agents)
    tools = _loaded("tools", findings, lambda: _tools(serve_config.args_of(config, "tools")))
    if tools is None:
        return Served(known_agents, sources)
    if start:
        offered, problems = run(_started(tools))
        findings.missing_here += problems
    else:
        offered = [tool for tool in tools if isinstance(tool, BaseTool)]
        problems = [
            f"tools of {source.origin}: known only to the running MCP server"
            for source in tools
            if source not in offered
        ]
        findings.not_checked += problems
    schemas = tuple(tool.tool_schema for tool in offered)
    names = None if problems else frozenset(tool.name for tool in offered)
    tool_agents = frozenset(name for name, offers_tools in (agents or {}).items() if offers_tools)
    return Served(known_agents, sources, names, schemas, tool_agents)


def _loaded(what: str, findings: Findings, load: Callable[[], T]) -> T | None:
    try:
        return load()
    except Exception as error:  # user code and files may fail in any way
        missing = findings.not_found if isinstance(error, FileNotFoundError) else findings.missing_here
        problems, reason = missing if _is_missing(error) else findings.wrong, f": {_reason(error)}"
        same = next((text for text in problems if text.endswith(reason)), None)
        if same is None:
            problems.append(f"{what}{reason}")
        else:  # several services import the project's modules
            problems[problems.index(same)] = f"{same.removesuffix(reason)}, {what}{reason}"
        return None


def _reason(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return described(error)
    return "; ".join(f"setting {'.'.join(map(str, detail['loc']))}: {detail['msg']}" for detail in error.errors())


def _is_missing(error: BaseException) -> bool:
    """Return whether the error, or one of its causes, is a missing package or file."""
    causes: list[BaseException] = [error]
    while (cause := causes[-1].__cause__) is not None:
        causes.append(cause)
    return any(isinstance(exception, ImportError | OSError) for exception in causes)


def _agents(args: dict[str, Any]) -> dict[str, bool]:
    """Each agent, and whether it offers tools."""
    from trackway.agent.loop import agents
    from trackway.agent.sessions.external import register_external
    from trackway.agent.settings import AgentSettings
    from trackway.agent.tool_agent import register_environments
    from trackway.agent.verl import load_loops

    settings = AgentSettings(**{"model_path": "", **args})
    load_loops(settings)
    register_external(settings)
    register_environments(settings)
    if settings.tool_parser is not None:
        tool_format(settings.tool_parser)
    return {loop.name: loop.offers_tools for loop in agents()}


def _data_sources(args: dict[str, Any]) -> frozenset[str]:
    from trackway.reward.scorers import ScorerRegistry, scorers_of
    from trackway.reward.settings import RewardSettings

    registry = ScorerRegistry(scorers_of(RewardSettings(**args)))
    return frozenset(source for scorer in registry.infos() for source in scorer.data_sources)


def _tools(args: dict[str, Any]) -> list[BaseTool | ToolSource]:
    from trackway.tools.loading import tools_of
    from trackway.tools.settings import ToolsSettings

    return tools_of(ToolsSettings(**args))


async def _started(tools: Sequence[BaseTool | ToolSource]) -> tuple[list[BaseTool], list[str]]:
    """The tools that started, and the reasons why others did not. All are closed again."""
    registry, started, problems = ToolRegistry(), list[BaseTool](), list[str]()
    waiting = [*tools]
    for tool in waiting:  # a source appends its tools
        try:
            async with asyncio.timeout(START_S):
                if isinstance(tool, ToolSource):
                    waiting += await tool.open()
                    continue
                await run_user_code(tool.start)
            registry.add(tool)
            started.append(tool)
        except Exception as error:
            problems.append(f"tool server: {tool.origin} does not start: {str(error) or type(error).__name__}")
    for tool in reversed(waiting):
        try:
            async with asyncio.timeout(START_S):
                await run_user_code(tool.close)
        except Exception as error:
            problems.append(f"tool server: {tool.origin} does not close: {str(error) or type(error).__name__}")
    return started, problems


@dataclass
class Subject:
    """A run and its services, which are either started for it or already running."""

    config: RunConfig
    services: RunServices | None
    """Services to start for the run. None when they are already running."""
    deployment: Deployment | None
    """The running services, or None when none are running."""
    settings: UpSettings
    occupied: str = ""
    """The reason why the run's name is not available. Empty when it is."""
    unsupported: Sequence[UnsupportedKey] = ()
    """Keys that `config` leaves out, as Trackway does not have what they ask for."""
    changes: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """Values of the command line that a run which is resumed takes."""
    resumes: str = ""
    """The run of this machine that is resumed, and the settings that it keeps, in words. Empty for a new run."""
    tools: Sequence[ToolSchema] = ()
    """The tools of the services, which `check_parts` sets."""

    @property
    def decisions(self) -> list[Decision]:
        """Decisions about the keys that describe the deployment."""
        return self.services.decisions if self.services is not None else decided_already(self.config)

    @property
    def elsewhere(self) -> bool:
        """Return whether files, model and GPUs are on other machines."""
        return self.deployment is not None and self.deployment.attached


@dataclass
class Checked:
    """The findings and the plan of a run."""

    findings: Findings
    plan: Forecast
    rows: str
    """The number of training rows, in words."""
    memory: GpuMemory | None = None
    """None for a run without GPUs, or a model that is not here."""


class RunCheck:
    """Checks one run. Each method adds to `findings`."""

    def __init__(self, subject: Subject, load: bool, report: Report) -> None:
        self._subject = subject
        self._load = load
        self._report = report
        self.findings = Findings()

    def values(self) -> None:
        """Check the configuration's values, without the dataset."""
        config, findings = self._subject.config, self.findings
        findings.unsupported += self._subject.unsupported
        try:
            runnable(config)
        except TrackwayError as error:
            findings.wrong.append(error.message)
        try:
            check_adapter(config)
        except TrackwayError as error:
            findings.missing_here.append(error.message)
        if not self._subject.elsewhere:
            try:
                check_storage(config)
            except TrackwayError as error:
                trainer = config.trainer
                is_elsewhere = trainer.resume_from_path or trainer.default_hdfs_dir
                (findings.missing_here if is_elsewhere else findings.wrong).append(error.message)

    def machine(self) -> None:
        """Check requirements other than dataset and model: GPUs, packages, API keys, ports, a free run name."""
        config, deployment, findings = self._subject.config, self._subject.deployment, self.findings
        if self._subject.occupied:
            findings.missing_here.append(self._subject.occupied)
        if not self._subject.elsewhere:
            if config.trackway.device.startswith("cuda") and not gpus_here():
                findings.missing_here.append(
                    f"trackway.device={config.trackway.device}: expected a GPU, got none; set cpu or auto"
                )
            if config.trackway.device == "auto" and config.learner_needs_gpus and not gpus_here():
                findings.missing_here.append(
                    f"trainer.n_gpus_per_node={config.trainer.n_gpus_per_node}: expected a GPU for "
                    "trackway.device=auto, got none; set trackway.device=cpu, or leave the number out"
                )
            # Starting services also starts an MLflow server.
            findings.missing_here += missing_for_loggers(config, deployment.mlflow_uri if deployment else "its own")
        if deployment is None:
            self._backends([TraceBackend.MLFLOW, *TracingSettings().usable], "this command")
            self.findings.missing_here += without_entity(self._subject.config)
        if deployment is not None:
            self._compare_services(deployment)
            if config.placement.nodes > 1:
                self._nodes(deployment)
        if self._subject.services is not None:
            self._start(self._subject.services)

    def _compare_services(self, deployment: Deployment) -> None:
        """Compare keys with the settings of running services. The settings of attached services are not known."""
        config, remedy = self._subject.config, "stop the services with `trackway down`, so that the run starts its own"
        transport = config.trackway.weights_transport
        positions = config.actor_rollout_ref.model.override_config.max_position_embeddings
        judge = config.reward.reward_model.model_path if config.reward.reward_model.enable else None
        for key, want, service, setting in (
            ("trackway.weights_transport", None if transport == "store" else transport, "rollout", "weights_transport"),
            (
                "actor_rollout_ref.model.override_config.max_position_embeddings",
                positions,
                "rollout",
                "max_position_embeddings",
            ),
            ("reward.reward_model.enable", judge, REWARD_MODEL, "model_name"),
        ):
            if not want:
                continue
            if deployment.attached:
                self.findings.not_checked.append(f"{key}: whether the {service} service has {setting}: {want}")
            elif (got := serve_config.args_of(deployment.serve_config, service).get(setting)) != want:
                self.findings.missing_here.append(
                    f"{key}: expected a {service} service with {setting}: {want}, got {got or 'none'}; {remedy}"
                )

    def _nodes(self, deployment: Deployment) -> None:
        """Compare the nodes that the learner's ranks need with the cluster's, which may still grow."""
        config, unchecked = self._subject.config, self.findings.not_checked
        if not deployment.attached:
            self.findings.missing_here.append(too_many_nodes(config))
        elif not deployment.dashboard_url:
            expected = config.placement.described(config.learner_needs_gpus)
            unchecked.append(f"trainer.nnodes: whether the cluster has {expected}; attach with --ray-url")
        else:
            try:
                offers = ServeApi(deployment.dashboard_url, ray_token()).node_resources()
            except UserError as error:
                unchecked.append(f"trainer.nnodes: {error}")
                return
            if shortage := config.placement.shortage(offers, config.learner_needs_gpus):
                seconds = f"{config.trackway.placement_timeout_s:g} s"
                unchecked.append(
                    f"{shortage} now; the run waits {seconds} for Ray's autoscaler to add them and fails without: add "
                    "such nodes, or lower trainer.nnodes"
                )

    def _start(self, services: RunServices) -> None:
        self.findings.missing_here += services.missing
        self.findings.not_found += services.not_found
        self.findings.replaced_here += services.replaced
        settings = self._subject.settings
        checks = [lambda: check_engine_python(serve_config.args_of(services.serve_config, "rollout"))]
        if self._load:
            self.findings.missing_here += preflight.missing_for_start(settings)
            checks.append(lambda: check_access(_with_tokens(services.serve_config, settings)))
        for check in checks:
            try:
                check()
            except UserError as error:
                self.findings.missing_here.append(str(error))

    def _backends(self, usable: Sequence[str], who: str) -> None:
        self.findings.missing_here += unusable(
            self._subject.config.actor_rollout_ref.rollout.trace.backend, usable, who
        )

    def served(self) -> Served:
        """The agents, scorers and tools that the services offer: queried from running services, else loaded here."""
        deployment, services = self._subject.deployment, self._subject.services
        with self.findings.part(self._report, "services", "querying" if deployment else "loading"):
            if services is None:
                assert deployment is not None
                return self._asked(deployment)
            if services.has_tool_files:
                return offered_by(services.serve_config, self.findings, start=self._load)
            no_files = {"tool_config_path": None, "function_tool_path": None}
            config = serve_config.with_options(services.serve_config, "tools", no_files)
            return replace(offered_by(config, self.findings, start=False), tools=None, schemas=())

    def _asked(self, deployment: Deployment) -> Served:
        findings, url = self.findings, deployment.url
        urls = ServiceUrls(agent_url=url("agent"), tools_url=url("tools"), reward_url=url("reward"), weights_url="")
        served, errors = run(ask_services(urls))
        code = run(loaded_code({name: url(name) for name in SERVICES}))
        findings.missing_here += not_loaded(self._subject.config, code)
        if not deployment.attached:
            findings.missing_here += changed_since_start(deployment.serve_config, code)
        unanswered = findings.missing_here if self._load else findings.not_checked
        unanswered += [f"the {name} service: {error.message}" for name, error in errors.items()]
        if self._subject.config.actor_rollout_ref.rollout.trace.backend:
            for service, usable in run(_trace_backends(deployment)).items():
                self._backends(usable, f"the {service} service")
        self._policy(deployment)
        return served

    def _policy(self, deployment: Deployment) -> None:
        """Check that the rollout service can hold what the run publishes, beside the runs that are active."""
        config, engines = self._subject.config, run(ask_engines(deployment.url("rollout")))
        try:
            if not self._subject.elsewhere:
                check_weights(config, engines.limits)
            infos = run(TrainerClient(deployment.url("trainer"), policy=CHECK_POLICY).runs())
            name = config.trainer.experiment_name
            others = [info for info in infos if info.state not in ENDED and info.run != name]
            check_place(engines.limits, policy_of(name, others, engines.default_policy), others)
        except TrackwayError as error:
            if error.code in (ErrorCode.INVALID_REQUEST, ErrorCode.CONFLICT):  # the trainer checks this again
                self.findings.missing_here.append(error.message)

    def tokenizer(self) -> "PreTrainedTokenizerBase | None":
        """The model's tokenizer, or None when this machine does not have it."""
        path, services = self._subject.config.actor_rollout_ref.model.path, self._subject.services
        if services and serve_config.args_of(services.serve_config, "agent").get("chat_model"):
            return None
        if path and self._subject.elsewhere:
            self.findings.not_checked.append(f"actor_rollout_ref.model.path: {path} is on the services' machines")
        if not path or self._subject.elsewhere:
            return None
        with self.findings.part(self._report, "tokenizer", "loading"):
            return tokenizer_here(path, self._load, self.findings)

    def memory(self) -> GpuMemory | None:
        """Forecast the memory of the run's GPUs, and compare it with this machine's."""
        services, deployment = self._subject.services, self._subject.deployment
        used = services.serve_config if services else deployment.serve_config if deployment else {}
        gpus = [] if self._subject.elsewhere else gpu_bytes()
        memory = gpu_memory(self._subject.config, used, gpus, self._load)
        if memory is not None:
            self.findings.missing_here += memory.missing
            self.findings.not_checked += memory.not_sure
        return memory

    def with_template(self, served: Served, rows: RowsHere) -> Served:
        """Measure the prompts with the model's tokenizer, and note what its chat template shows of tools."""
        tokenizer = self.tokenizer()
        rows.measure(tokenizer, served)
        if tokenizer is None:
            return served
        variables = self._subject.config.data.apply_chat_template_kwargs
        return replace(served, without_tools=template_support(tokenizer, variables).lacks)


def check_run(subject: Subject, load: bool, report: Report = lambda name, state: None) -> Checked:
    """Run all checks. Problems are collected in the findings and not raised."""
    check, config = RunCheck(subject, load, report), subject.config
    check.values()
    check.machine()
    here = RowsHere(config, check.findings, report, None if load else MEASURED_ROWS)
    served = Served() if config.is_supervised else check.served()
    if subject.elsewhere:
        here.leave_to_the_trainer()
    elif config.is_supervised:
        here.read_conversations(check.tokenizer())
    else:
        here.read()
        served = check.with_template(served, here)
    check.findings.wrong += unserved(config, here.used, served)
    try:
        plan = forecast(config, here.number)
    except TrackwayError as error:
        check.findings.wrong.append(error.message)
        plan = forecast(config, None)
    return Checked(check.findings, plan, here.sentence, check.memory())


def check_start(subject: Subject) -> None:
    """Raise UserError if a value of the configuration is invalid, or this machine lacks what the run needs."""
    check = RunCheck(subject, False, lambda name, state: None)
    check.values()
    check.machine()
    check.findings.refuse()


def check_parts(subject: Subject, report: Report = lambda name, state: None) -> tuple[Findings, dict[str, Rows]]:
    """Check what trajectories need: values, rows, agent loops, scorers, tools, the tokenizer; and the rows, by key.

    Rows are read here also for services on other machines. Problems are collected in the findings and not raised.
    """
    check, config = RunCheck(subject, True, report), subject.config
    check.values()
    if subject.services is not None:
        check.findings.missing_here += subject.services.missing
        check.findings.not_found += subject.services.not_found
        if config.reward.reward_model.enable:
            check.findings.missing_here.append(
                "reward.reward_model.enable: expected running services with the reward model, got none, and a trial "
                "starts no second model; start them with `trackway up` in the project"
            )
    served = check.served()
    here = RowsHere(config, check.findings, report, MEASURED_ROWS)
    here.read()
    served = check.with_template(served, here)
    subject.tools = served.schemas
    check.findings.wrong += unserved(config, here.used, served)
    return check.findings, here.used


def _with_tokens(config: dict[str, Any], settings: UpSettings) -> dict[str, Any]:
    tokens = {"auth": {"tokens_file": str(settings.tokens_file.resolve())}} if settings.tokens_file else {}
    return serve_config.complete(config, host=host_of(config), port=0, common=tokens, per_service={})


async def _trace_backends(deployment: Deployment) -> dict[str, Sequence[str]]:
    """The trace backends that each reachable service can export to."""
    usable: dict[str, Sequence[str]] = {}
    for service in deployment.services:
        client = ServiceClient(deployment.url(service), policy=CHECK_POLICY)
        try:
            usable[service] = (await client.call("GET", "/health", reply=Health)).trace_backends
        except TrackwayError:  # the trainer checks this again when the run starts, and logs it
            continue
    return usable
