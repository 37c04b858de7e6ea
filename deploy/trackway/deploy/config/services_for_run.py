"""The services that a run asks for: from its configuration and this machine's GPUs to a Serve config.

rollout.name, tensor_model_parallel_size, ...     ->  the rollout service's engine, replicas and GPUs
multi_turn.tool_config_path, function_tool_path   ->  the tool server's tools

What this machine cannot give as asked is listed: as a decision with its reason, or, where it would change the run, as
missing here.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trackway.deploy.config import serve_config
from trackway.deploy.config.engine_python import SERVERS, engine_python, runs_already
from trackway.deploy.config.serve_config import Replicas
from trackway.trainer.config import RunConfig, given_to_deployment
from trackway.trainer.config.compose import leaves

_ROLLOUT = "actor_rollout_ref.rollout"
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
    "free_cache_engine",
    "multi_stage_wake_up",
)
_SERVER_SEQS = 256
"""Requests of one server at a time, unless the run says; the embedded engine has a slot of memory for each."""
_ENGINE_LEN = 4096
"""What an engine takes at most unless told otherwise (RolloutSettings.max_model_len)."""


NO_GPU = "this machine has no GPU"


class Decision(NamedTuple):
    """What a key asked for, what it gets here, and why."""

    key: str
    asked: str
    got: str
    reason: str = ""


@dataclass
class RunServices:
    """A Serve config for the run, and what was decided on the way to it."""

    config: RunConfig
    """Without what cannot be had here."""
    serve_config: dict[str, Any]
    engine: str
    replicas: int | None = None
    """Of the rollout service; None is as the base config says."""
    arithmetic: str = ""
    """How GPUs make replicas, here or where there are as many as asked for."""
    decisions: list[Decision] = field(default_factory=list)
    has_tool_files: bool = True
    """Whether the files of tools that the run names are on this machine."""
    missing: list[str] = field(default_factory=list)
    """What this machine lacks of what the run needs: it cannot start here."""

    @property
    def replaced(self) -> list[str]:
        """What this machine lacks and the run does without."""
        return [
            f"{one.key}: {one.asked} asked, {one.reason}; here {one.got}"
            for one in self.decisions
            if one.reason == NO_GPU
        ]

    def decide(self, key: str, asked: object, got: str, reason: str = "") -> None:
        """Add a decision."""
        self.decisions.append(Decision(key, str(asked), got, reason))


def gpus_here() -> int:
    """GPUs that this process can see."""
    import torch

    return torch.cuda.device_count()


def decided_already(config: RunConfig) -> list[Decision]:
    """The keys that a run on running services cannot change."""
    values = leaves(config.model_dump(mode="json"))
    why = "decided by the running deployment"
    return [Decision(key, str(values[key]), "as it runs", why) for key in given_to_deployment(config)]


def services_for(config: RunConfig, gpus: int, base: dict[str, Any]) -> RunServices:
    """The base config with what the run says of its services, on a machine with so many GPUs.

    Where the machine lacks what the run needs, and no smaller deployment would be the same run, `missing` says what.
    """
    made = RunServices(config, base, _engine(config, gpus, base))
    nodes = config.trainer.nnodes or 1
    if nodes > 1:
        made.missing.append(
            f"trainer.nnodes: expected 1 on this machine, got {nodes}; several machines need a Ray cluster: deploy the "
            "services there (KubeRay, or `ray start` on each machine), then train on them with `trackway train`"
        )
    if gpus and made.engine != "sim":
        _place_on_gpus(config, gpus, made)
    else:
        _place_without_gpu(config, made)
    _set_engine(config, gpus, made)
    _set_tools(config, made)
    made.config = _without(config, free_cache=made.engine not in SERVERS, gpus=not gpus)
    return made


def _without(config: RunConfig, *, free_cache: bool, gpus: bool) -> RunConfig:
    """The configuration without what the run's own process would miss, or wrongly count on."""
    tree = config.model_dump(mode="json")
    if free_cache:
        tree["actor_rollout_ref"]["rollout"]["free_cache_engine"] = None
    if gpus:
        tree["trainer"]["n_gpus_per_node"] = None
    return RunConfig.model_validate(tree)


def _engine(config: RunConfig, gpus: int, base: dict[str, Any]) -> str:
    args = serve_config.args_of(base, "rollout")
    asked = config.actor_rollout_ref.rollout.name or args.get("engine", "torch")
    if asked == "hf":
        return "torch"
    there = runs_already(args) or (asked == "vllm" and engine_python(args) is not None)  # vLLM has builds for the CPU
    return "torch" if asked in SERVERS and not gpus and not there else asked


def _place_on_gpus(config: RunConfig, gpus: int, made: RunServices) -> None:
    rollout, asked = config.actor_rollout_ref.rollout, config.trainer.n_gpus_per_node
    if (rollout.name, rollout.tensor_model_parallel_size, asked) == (None, None, None):
        return
    own, each = gpus if asked is None else asked, rollout.tensor_model_parallel_size or 1
    if not 1 <= own <= gpus:
        made.missing.append(f"trainer.n_gpus_per_node: expected 1 to {gpus}, the GPUs of this machine, got {own}")
        if own < 1:
            return
    if made.engine not in SERVERS and each > 1:
        made.decide(f"{_ROLLOUT}.tensor_model_parallel_size", each, "1", f"the {made.engine} engine takes one GPU")
        each = 1
    if each > own:
        made.missing.append(f"{_ROLLOUT}.tensor_model_parallel_size: expected at most the run's {own} GPUs, got {each}")
        return
    made.replicas, made.arithmetic = own // each, _arithmetic(own, each)
    made.decide("trainer.n_gpus_per_node", own, f"{made.replicas} rollout replicas", made.arithmetic)
    replicas = Replicas(made.replicas, made.replicas)
    made.serve_config = serve_config.with_replicas(made.serve_config, "rollout", replicas)
    made.serve_config = serve_config.with_options(
        made.serve_config, "rollout", {}, {"ray_actor_options": {"num_gpus": each}}
    )


def _arithmetic(gpus: int, each: int) -> str:
    idle = f"; {gpus % each} stay idle, as {each} does not divide {gpus}" if gpus % each else ""
    return f"{gpus} GPUs / {each} each = {gpus // each}{idle}"


def _place_without_gpu(config: RunConfig, made: RunServices) -> None:
    rollout = config.actor_rollout_ref.rollout
    why = "the sim engine needs no GPU" if made.engine == "sim" else NO_GPU
    if rollout.name in SERVERS and made.engine == "torch":
        made.decide(f"{_ROLLOUT}.name", rollout.name, "torch, the embedded engine", why)
    if rollout.tensor_model_parallel_size is not None:
        asked = rollout.tensor_model_parallel_size
        made.decide(f"{_ROLLOUT}.tensor_model_parallel_size", asked, "one replica of one process", why)
    if config.trainer.n_gpus_per_node:
        made.decide("trainer.n_gpus_per_node", config.trainer.n_gpus_per_node, "0", why)
        made.arithmetic = _arithmetic(config.trainer.n_gpus_per_node, rollout.tensor_model_parallel_size or 1)


def _set_engine(config: RunConfig, gpus: int, made: RunServices) -> None:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    server = made.engine in SERVERS
    for key in _OF_SERVERS:
        if not server and getattr(rollout, key) is not None:
            reason = f"the {made.engine} engine has no such setting"
            made.decide(f"{_ROLLOUT}.{key}", getattr(rollout, key), "no effect", reason)
    keys = [key for key in _SETTINGS if server or key not in _OF_SERVERS]
    args: dict[str, Any] = {_SETTINGS[key]: getattr(rollout, key) for key in keys if getattr(rollout, key) is not None}
    args["engine"] = made.engine
    longest = data.max_prompt_length + data.max_response_length
    if longest > _ENGINE_LEN:
        args.setdefault("max_model_len", longest)
    options: dict[str, Any] = {}
    if server:
        base = serve_config.args_of(made.serve_config, "rollout")
        if base.get("engine") != made.engine:  # else the file's number is meant for this one
            args.setdefault("max_num_seqs", _SERVER_SEQS)
        options["max_ongoing_requests"] = 2 * args.get("max_num_seqs", base.get("max_num_seqs", _SERVER_SEQS))
        args |= _shared_gpus(config, made) if gpus else {"device": "cpu"}
    made.serve_config = serve_config.with_options(made.serve_config, "rollout", args, options)


def _shared_gpus(config: RunConfig, made: RunServices) -> dict[str, Any]:
    rollout = config.actor_rollout_ref.rollout
    sleeps = rollout.free_cache_engine is not False
    if sleeps:
        asked = "" if rollout.free_cache_engine is None else "True"
        made.decide(f"{_ROLLOUT}.free_cache_engine", asked, "on", "the learner computes on GPU 0 while engines sleep")
    parallel = rollout.tensor_model_parallel_size
    return {"enable_sleep": sleeps, **({} if parallel is None else {"tensor_parallel_size": parallel})}


def _set_tools(config: RunConfig, made: RunServices) -> None:
    multi_turn = config.actor_rollout_ref.rollout.multi_turn
    args: dict[str, Any] = {}
    for name in ("tool_config_path", "function_tool_path"):
        file = getattr(multi_turn, name)
        if file is None:
            continue
        if not Path(file).is_file():
            made.missing.append(f"{_ROLLOUT}.multi_turn.{name}: expected a file, got {file}; correct the path")
            made.has_tool_files = False
        args[name] = file
    made.serve_config = serve_config.with_options(made.serve_config, "tools", args)
