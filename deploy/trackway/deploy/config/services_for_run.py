"""The Serve config for a run, from its configuration and this machine's GPUs.

rollout.name, tensor_model_parallel_size, ...     ->  the rollout service's engine, replicas and GPUs
multi_turn.tool_config_path, function_tool_path   ->  the tool server's tools
trackway.modules, code_path                       ->  what the agent, tools and reward services import
trackway.functions_file                           ->  functions of another process as tools and scorer
agent.agent_loop_config_path, multi_turn.format   ->  the agent service's loops and tool format
data.apply_chat_template_kwargs                   ->  the agent service's chat template
custom_reward_function                            ->  the reward service's scorer
reward.reward_model                               ->  a service of its own, which scores or which that scorer asks

A request that this machine cannot meet is recorded: as a decision with its reason, or as missing if the run would
differ.
"""

import ctypes
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import JsonValue

from trackway.chat.tool_formats import BUILT_IN
from trackway.deploy.config import serve_config
from trackway.deploy.config.serve_config import SERVERS, Options, Replicas, engine_python, runs_already
from trackway.reward.models import REWARD_MODEL
from trackway.rollout.classifiers import is_classifier
from trackway.rollout.engines.admission import OF_POLICY, OF_REWARD_MODEL, ModelFacts, too_long
from trackway.rollout.settings import DEFAULT_MAX_LEN
from trackway.run_config import RunConfig, given_to_deployment
from trackway.run_config.compose import leaves
from trackway.wire.errors import TrackwayError

_ROLLOUT = "actor_rollout_ref.rollout"
_GPUS = "trainer.n_gpus_per_node"
_SETTINGS = {
    "gpu_memory_utilization": "gpu_memory_utilization",
    "enforce_eager": "enforce_eager",
    "enable_prefix_caching": "prefix_caching",
    "dtype": "dtype",
    "max_model_len": "max_model_len",
    "max_num_seqs": "max_num_seqs",
}
"""Key below actor_rollout_ref.rollout -> setting of the rollout service."""
_OF_SERVERS = (
    "gpu_memory_utilization",
    "enforce_eager",
    "enable_prefix_caching",
)
_OF_SLEEP = ("free_cache_engine", "multi_stage_wake_up")
_WHILE_ASLEEP = "the learner computes on GPU 0 while engines sleep"
_REWARD_MODEL = "reward.reward_model"
_OF_THE_MACHINE = ("engine_python", "engine_start_s", "device")
"""Settings of a rollout service that belong to the machine, for any model."""
_SERVER_SEQS = 256
"""Default number of concurrent requests of one server. The embedded engine reserves memory for each request."""


_BY_SEED = "--enable-deterministic-inference"
NO_GPU = "this machine has no GPU"


class Decision(NamedTuple):
    """The requested and the actual value of a key, and the reason for a difference."""

    key: str
    asked: str
    got: str
    reason: str = ""


@dataclass
class RunServices:
    """A Serve config for the run, and the decisions that led to it."""

    config: RunConfig
    """The run's configuration without settings that this machine cannot provide."""
    serve_config: dict[str, Any]
    engine: str
    replicas: int | None = None
    """Replicas of the rollout service. None keeps the base config's number."""
    arithmetic: str = ""
    """How the number of replicas follows from the number of GPUs."""
    decisions: list[Decision] = field(default_factory=list)
    has_tool_files: bool = True
    """True if the tool files named by the run exist on this machine."""
    missing: list[str] = field(default_factory=list)
    """Requirements of the run that this machine lacks. The run cannot start here."""
    not_found: list[str] = field(default_factory=list)
    """Paths of the run's own parts that do not exist here. The run cannot start here."""

    @property
    def replaced(self) -> list[str]:
        """Requests that this machine cannot meet and that the run can do without."""
        return [
            f"{decision.key}: {decision.asked} requested, {decision.reason}; using {decision.got}"
            for decision in self.decisions
            if decision.reason == NO_GPU
        ]

    def give(self, service: str, args: Options, deployment: Options | None = None) -> None:
        """Merge settings and deployment options into a service's."""
        self.serve_config = serve_config.with_options(self.serve_config, service, args, deployment)

    def decide(self, key: str, asked: object, got: str, reason: str = "") -> None:
        """Record a decision."""
        self.decisions.append(Decision(key, str(asked), got, reason))


def gpus_here() -> int:
    """GPUs that this process can see."""
    if not has_gpu_driver():
        return 0  # before torch, whose import takes a second
    import torch

    return torch.cuda.device_count()


def has_gpu_driver() -> bool:
    """Return whether the driver of NVIDIA or AMD is on this machine. Without it torch sees no GPU."""
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return os.path.exists("/dev/kfd")
    return True


def visible_gpus(count: int) -> list[str]:
    """Names of the `count` GPUs that processes of this one see, as CUDA_VISIBLE_DEVICES has them."""
    given = os.environ.get(serve_config.VISIBLE)
    return given.split(",")[:count] if given else [str(index) for index in range(count)]


def gpu_bytes() -> list[int]:
    """The memory of each GPU that this process can see."""
    import torch

    return [torch.cuda.get_device_properties(index).total_memory for index in range(torch.cuda.device_count())]


def cannot_transfer(engine: str, gpus: int, replicas: int) -> list[str]:
    """Why weights cannot reach engines by CUDA IPC on a machine with `gpus` GPUs. Empty when they may."""
    got = f"engine {engine}" if engine != "vllm" else NO_GPU if not gpus else ""
    remedy = "set rollout.name=vllm on a machine with a GPU"
    if not got and replicas > 1:
        got, remedy = f"{replicas} replicas", "set trainer.n_gpus_per_node=1"
    expected = "trackway.weights_transport=ipc: expected the engine vllm on the learner's GPU"
    return [f"{expected}, got {got}; {remedy}, or leave the key out"] if got else []


def decided_already(config: RunConfig) -> list[Decision]:
    """Keys that a run cannot change because its services are already running."""
    values = leaves(config.model_dump(mode="json"))
    why = "decided by the running deployment"
    given = [key for key in given_to_deployment(config) if key != _GPUS]  # it places the learner's ranks
    return [Decision(key, str(values[key]), "as deployed", why) for key in given]


def too_many_nodes(config: RunConfig) -> str:
    """Why services of this machine are not enough for the run. Empty when one machine is."""
    nodes = config.trainer.nnodes or 1
    if nodes == 1:
        return ""
    return (
        f"trainer.nnodes: expected 1 on this machine, got {nodes}; several machines need a Ray cluster: deploy the "
        "services there (KubeRay, or `ray start` on each machine), then train on them with `trackway train`"
    )


def services_for(config: RunConfig, gpus: int, base: dict[str, Any]) -> RunServices:
    """The base config with the run's service settings applied, for a machine with `gpus` GPUs.

    `missing` lists requirements that the machine lacks and that no smaller deployment can meet.
    """
    rollout_args = serve_config.args_of(base, "rollout")
    if config.is_supervised and gpus:  # no engine generates meanwhile
        config = config.with_values({f"{_ROLLOUT}.free_cache_engine": True})
    services = RunServices(config, base, _engine(config.actor_rollout_ref.rollout.name, gpus, rollout_args))
    if too_many := too_many_nodes(config):
        services.missing.append(too_many)
    if gpus:
        config = _place_on_gpus(config, gpus, services)
    else:
        _place_without_gpu(config, services)
    _set_engine(config, gpus, services)
    services.missing += _too_long(services, "rollout", config.actor_rollout_ref.model.path, OF_POLICY)
    _set_own_parts(config, services)
    if config.reward.reward_model.enable:
        _set_reward_model(config, gpus, base, services)
    keeps_memory = services.engine not in (*SERVERS, "torch") or _keeps_memory(services.engine, gpus, rollout_args)
    services.config = _without(config, free_cache=keeps_memory, gpus=not gpus)
    return services


def _without(config: RunConfig, *, free_cache: bool, gpus: bool) -> RunConfig:
    """The configuration without settings that the run's process could not use here."""
    unusable = {"actor_rollout_ref.rollout.free_cache_engine": free_cache, "trainer.n_gpus_per_node": gpus}
    return config.with_values({key: None for key, left_out in unusable.items() if left_out})


def _keeps_memory(engine: str, gpus: int, args: dict[str, Any]) -> bool:
    """Return whether the engine's server is started on a CPU: vLLM's worker there ignores calls to sleep."""
    return engine in SERVERS and not gpus and not runs_already(args)


def _engine(name: str | None, gpus: int, args: dict[str, Any]) -> str:
    """The engine of this name, or of these settings, that can run here."""
    asked = name or args.get("engine", "torch")
    if asked == "hf":
        return "torch"
    there = runs_already(args) or (asked == "vllm" and engine_python(args) is not None)  # vLLM has builds for the CPU
    return "torch" if asked in SERVERS and not gpus and not there else asked


def _place_on_gpus(config: RunConfig, gpus: int, services: RunServices) -> RunConfig:
    """Place the rollout replicas. Return the configuration with the number of the run's GPUs."""
    rollout, asked = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    if (rollout.name, rollout.tensor_model_parallel_size, asked) == (None, None, None):
        if gpus > 1:
            services.decide(_GPUS, "", "1 rank, on GPU 0", f"set it to use the {gpus} GPUs of this machine")
        return config
    run_gpus, each = gpus if asked is None else asked, rollout.tensor_model_parallel_size or 1
    if not 1 <= run_gpus <= gpus:
        services.missing.append(
            f"trainer.n_gpus_per_node: expected 1 to {gpus}, the GPUs of this machine, got {run_gpus}"
        )
        if run_gpus < 1:
            return config
    if services.engine not in SERVERS and each > 1:
        services.decide(
            f"{_ROLLOUT}.tensor_model_parallel_size", each, "1", f"the {services.engine} engine takes one GPU"
        )
        each = 1
    if each > run_gpus:
        services.missing.append(
            f"{_ROLLOUT}.tensor_model_parallel_size: expected at most the run's {run_gpus} GPUs, got {each}"
        )
        return config
    services.replicas, services.arithmetic = run_gpus // each, _arithmetic(run_gpus, each)
    services.decide("trainer.n_gpus_per_node", run_gpus, f"{services.replicas} rollout replicas", services.arithmetic)
    replicas = Replicas(services.replicas, services.replicas)
    services.serve_config = serve_config.with_replicas(services.serve_config, "rollout", replicas)
    services.give("rollout", {}, {"ray_actor_options": {"num_gpus": each}})
    return config.with_values({_GPUS: run_gpus})


def _arithmetic(gpus: int, each: int) -> str:
    idle = f"; {gpus % each} stay idle, as {each} does not divide {gpus}" if gpus % each else ""
    return f"{gpus} GPUs / {each} each = {gpus // each}{idle}"


def _place_without_gpu(config: RunConfig, services: RunServices) -> None:
    rollout = config.actor_rollout_ref.rollout
    if rollout.name in SERVERS and services.engine == "torch":
        services.decide(f"{_ROLLOUT}.name", rollout.name, "torch, the embedded engine", NO_GPU)
    if rollout.tensor_model_parallel_size is not None:
        asked = rollout.tensor_model_parallel_size
        services.decide(f"{_ROLLOUT}.tensor_model_parallel_size", asked, "one replica of one process", NO_GPU)
    if config.trainer.n_gpus_per_node:
        services.decide("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, "0", NO_GPU)
        services.arithmetic = _arithmetic(config.trainer.n_gpus_per_node, rollout.tensor_model_parallel_size or 1)


def _set_engine(config: RunConfig, gpus: int, services: RunServices) -> None:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    server = services.engine in SERVERS
    may_sleep = server or services.engine == "torch"
    for key in (*(() if server else _OF_SERVERS), *(() if may_sleep else _OF_SLEEP)):
        if getattr(rollout, key) is not None:
            reason = f"the {services.engine} engine has no such setting"
            services.decide(f"{_ROLLOUT}.{key}", getattr(rollout, key), "no effect", reason)
    for name in SERVERS:
        asked = getattr(rollout.engine_kwargs, name)
        if asked and services.engine != name:
            services.decide(f"{_ROLLOUT}.engine_kwargs.{name}", asked, "no effect", f"the engine is {services.engine}")
    keys = [key for key in _SETTINGS if server or key not in _OF_SERVERS]
    args: dict[str, Any] = {_SETTINGS[key]: getattr(rollout, key) for key in keys if getattr(rollout, key) is not None}
    args["engine"] = services.engine
    longest = data.max_prompt_length + data.max_response_length
    if longest > DEFAULT_MAX_LEN:
        args.setdefault("max_model_len", longest)
    options: dict[str, Any] = {}
    model = config.actor_rollout_ref.model
    if model.override_config.max_position_embeddings is not None:
        args["max_position_embeddings"] = model.override_config.max_position_embeddings
    if config.trackway.float32_head and server:
        args["float32_head"] = True
    elif config.trackway.float32_head:
        services.decide("trackway.float32_head", True, "only in the learner", f"{services.engine} lacks it")
    if server and model.lora_rank and not model.lora.merge:
        args["max_lora_rank"] = model.lora_rank
    if config.trackway.weights_transport != "store":
        services.missing += cannot_transfer(services.engine, gpus, services.replicas or 1)
        args["weights_transport"] = config.trackway.weights_transport
    if server:
        base = serve_config.args_of(services.serve_config, "rollout")
        if base.get("engine") != services.engine:  # otherwise the file's number is meant for this engine
            args.setdefault("max_num_seqs", _SERVER_SEQS)
        options["max_ongoing_requests"] = 2 * args.get("max_num_seqs", base.get("max_num_seqs", _SERVER_SEQS))
        args |= _shared_gpus(config, services) if gpus else {"device": "cpu"}
        if _keeps_memory(services.engine, gpus, base):
            args |= {"enable_sleep": False} if base.get("enable_sleep") else {}
            if rollout.free_cache_engine:
                reason = f"{services.engine} keeps its memory on a CPU, where it ignores calls to sleep"
                services.decide(f"{_ROLLOUT}.free_cache_engine", True, "no effect", reason)
        own = getattr(rollout.engine_kwargs, services.engine)
        if own:
            there = base.get("engine_args", []) if base.get("engine") == services.engine else []
            args["engine_args"] = [*there, *engine_arguments(own)]
        by_seed = {**base, **args}.get("engine_args", [])
        if services.engine == "sglang" and rollout.seed is not None and _BY_SEED not in by_seed:
            reason = "SGLang samples by seeds only with engine_kwargs.sglang.enable_deterministic_inference=true"
            services.decide(f"{_ROLLOUT}.seed", rollout.seed, "no effect", reason)
    elif may_sleep and rollout.free_cache_engine:
        args["enable_sleep"] = True
        why = _WHILE_ASLEEP if gpus else "the weights of the engine are in a file while the learner computes"
        services.decide(f"{_ROLLOUT}.free_cache_engine", True, "on", why)
    services.give("rollout", args, options)


def _too_long(services: RunServices, application: str, model: str | None, keys: tuple[str, str]) -> list[str]:
    """Why the embedded engine would not start with its context length, if the model is here and can be read."""
    args = serve_config.args_of(services.serve_config, application)
    asked = args.get("max_model_len")
    if args["engine"] != "torch" or asked is None:
        return []
    try:
        positions = ModelFacts.read(Path(model or ""), args.get("max_position_embeddings")).max_positions
    except TrackwayError:
        return []  # the engine says why when it starts
    problem = too_long(asked, positions, keys)
    return [problem] if problem else []


def engine_arguments(kwargs: Mapping[str, JsonValue]) -> list[str]:
    """The command line of an engine's server for these arguments, as verl makes it.

    True is a switch and false leaves it out, null and empty lists are nothing, and a mapping is JSON.
    """
    words: list[str] = []
    for name, value in kwargs.items():
        if value is None or value is False or value == []:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if isinstance(value, list):
            words += map(str, value)
        elif value is not True:
            words.append(json.dumps(value) if isinstance(value, dict) else str(value))
    return words


def _shared_gpus(config: RunConfig, services: RunServices) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    sleeps = rollout.free_cache_engine is not False
    if sleeps:
        asked = "" if rollout.free_cache_engine is None else "True"
        services.decide(f"{_ROLLOUT}.free_cache_engine", asked, "on", _WHILE_ASLEEP)
    parallel = rollout.tensor_model_parallel_size
    return {"enable_sleep": sleeps, **({} if parallel is None else {"tensor_parallel_size": parallel})}


def _set_own_parts(config: RunConfig, services: RunServices) -> None:
    """Give the services the run's modules, files of tools and loops, formats, chat template and scoring function."""
    rollout, own, function = config.actor_rollout_ref.rollout, config.trackway, config.custom_reward_function
    tools = {name: getattr(rollout.multi_turn, name) for name in ("tool_config_path", "function_tool_path")}
    for name, file in tools.items():
        if file is not None and not Path(file).is_file():
            services.not_found.append(f"{_ROLLOUT}.multi_turn.{name}: expected a file, got {file}; correct the path")
            services.has_tool_files = False
    if own.code_path is not None and not Path(own.code_path).is_dir():
        services.not_found.append(f"trackway.code_path: expected a folder, got {own.code_path}; correct the path")
    parser, template = rollout.multi_turn.format, config.data.apply_chat_template_kwargs or None
    loops = {"agent_loop_config_path": rollout.agent.agent_loop_config_path}
    scorer = None if function.path is None else function.model_dump(mode="json")
    code = {"modules": own.modules, "code_path": own.code_path}
    served = {"functions_file": own.functions_file}
    for service, args in {
        "tools": {**tools, **served, **code},
        "agent": {**loops, "tool_parser": parser, "chat_template_kwargs": template, **code},
        "reward": {"custom_reward_function": scorer, **served, **code},
        "rollout": {"tool_parser": parser if parser in BUILT_IN else None},  # it loads no code of a project
    }.items():
        services.give(service, {name: value for name, value in args.items() if value is not None})


def _set_reward_model(config: RunConfig, gpus: int, base: dict[str, Any], services: RunServices) -> None:
    """Add the service of the reward model: a rollout service without a weight store, whose weights stay as they are."""
    model = config.reward.reward_model
    folder = Path(model.model_path or "")
    scores = config.custom_reward_function.path is None
    if problem := not_scoring(folder) if scores else "":
        services.missing.append(problem)
    services.decide(f"{_REWARD_MODEL}.model_path", model.model_path, _kind(folder, scores=scores))
    there = {key: value for key, value in serve_config.args_of(base, "rollout").items() if key in _OF_THE_MACHINE}
    engine = _engine(model.rollout.name, gpus, there)
    if model.rollout.name in SERVERS and engine == "torch":
        services.decide(f"{_REWARD_MODEL}.rollout.name", model.rollout.name, "torch, the embedded engine", NO_GPU)
    server = engine in SERVERS
    args: dict[str, Any] = {**there, "engine": engine, "model_path": model.model_path, "model_name": model.model_path}
    for key, setting in _SETTINGS.items():
        value = model.max_model_len if key == "max_model_len" else getattr(model.rollout, key)
        if value is not None and (server or key not in _OF_SERVERS):
            args[setting] = value
    needed = (model.rollout.tensor_model_parallel_size or 1) if server else 1
    if server:
        args |= {"tensor_parallel_size": needed} if gpus else {"device": "cpu"}
        args.setdefault("max_num_seqs", _SERVER_SEQS)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if longest > DEFAULT_MAX_LEN and (scores or is_classifier(folder)):
        args.setdefault("max_model_len", longest)
    taken = config.trainer.n_gpus_per_node or int(config.trackway.device != "cpu")
    if gpus and taken + needed > gpus:
        services.missing.append(
            f"{_REWARD_MODEL}: expected {needed} GPUs beside the run's {taken}, got {gpus} on this machine; lower "
            f"{_GPUS}, or serve the model elsewhere and give its address as "
            "custom_reward_function.reward_kwargs.reward_router_address"
        )
    options: dict[str, Any] = {"max_ongoing_requests": 2 * args.get("max_num_seqs", _SERVER_SEQS)}
    if gpus:
        options["ray_actor_options"] = serve_config.on_own_gpus(visible_gpus(gpus)[-needed:])
    services.serve_config = serve_config.with_another(services.serve_config, "rollout", REWARD_MODEL, args, options)
    services.missing += _too_long(services, REWARD_MODEL, model.model_path, OF_REWARD_MODEL)
    asks = {REWARD_MODEL: {"path": model.model_path}}
    services.give("reward", asks)


def not_scoring(folder: Path) -> str:
    """Why the reward model of a folder cannot score without a function. Empty when it can, or is not here yet."""
    if not (folder / "config.json").is_file() or is_classifier(folder):
        return ""
    return (
        f"{_REWARD_MODEL}.model_path: expected a classifier (an architecture *ForSequenceClassification) without "
        f"custom_reward_function.path, got a generative model at {folder}; name a function that asks it"
    )


def _kind(folder: Path, *, scores: bool) -> str:
    """Reward model of the run, and who asks it."""
    asks = "whose logit of the conversation is the score" if scores else "which custom_reward_function asks"
    if not (folder / "config.json").is_file():
        return f"a model not on this machine yet, {asks}"
    return f"a classifier, {asks}" if is_classifier(folder) else f"a generative model, {asks}"
