"""Checks that a run can share the services with others, before it starts."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from pydantic import SecretStr

from trackway.clients import CallPolicy, RolloutClient
from trackway.run_config import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import BASE_POLICY, Architecture, PolicyLimits
from trackway.wire.trainer import RunInfo

_QUESTION = CallPolicy.question(5.0)


class SharedEngines(NamedTuple):
    """The rollout service's engines. The defaults are for a service that does not say."""

    sleep: bool = False
    """True if a replica can give its memory to a learner."""
    default_policy: str = ""
    limits: PolicyLimits | None = None


async def ask_engines(url: str | None, token: SecretStr | None = None) -> SharedEngines:
    """Ask the rollout service. Without an answer the defaults are returned."""
    if url is None:
        return SharedEngines()
    rollout = RolloutClient(url, policy=_QUESTION, token=token)
    with suppress(TrackwayError):
        listed = await rollout.policies()
        default = next((policy.name for policy in listed.policies if policy.is_default), "")
        sleep = any(replica.can_sleep for replica in (await rollout.sleeping()).replicas)
        return SharedEngines(sleep, default, listed.limits)
    return SharedEngines()


def check_beside(config: RunConfig, others: Sequence[RunInfo], configs: Mapping[str, RunConfig], sleep: bool) -> None:
    """Raise CONFLICT if the run, or one of the others, needs the engines, the tools or the reward for itself."""
    for run, its in {"this run": config, **configs}.items() if others else ():
        alone = "enable_sleep of the rollout service" if sleep else _unshared(its)
        if alone:
            raise TrackwayError(
                ErrorCode.CONFLICT,
                f"expected runs that can share the services, got {', '.join(configs)}, and {alone} for "
                f"{run}; wait until one ends, or leave that setting out",
                run=others[0].run,
            )


def _unshared(config: RunConfig) -> str:
    if config.trackway.functions_file is not None:  # its reward scores every data source
        return "trackway.functions_file"
    return "trackway.weights_transport" if config.trackway.weights_transport != "store" else ""


def policy_of(name: str, others: Sequence[RunInfo], default_policy: str) -> str | None:
    """Return the policy of a new run: None for the default one, or its own name while another run trains that one.

    Raises CONFLICT for a name that the rollout service has for another policy.
    """
    if all(info.policy is not None for info in others):
        return None
    if name in (BASE_POLICY, default_policy):
        message = f"expected a run with another name beside {others[0].run}, got {name!r}, a policy of the rollout "
        raise TrackwayError(ErrorCode.CONFLICT, f"{message}service; rename it (trainer.experiment_name)", run=name)
    return name


def check_place(limits: PolicyLimits | None, policy: str | None, others: Sequence[RunInfo]) -> None:
    """Raise unless the rollout service has a place for a run's policy beside its default one and the other runs'.

    CONFLICT if a place may come free, else INVALID_REQUEST.
    """
    if limits is None:
        return
    bound, remedy = "", limits.remedy
    if len({None, policy, *(info.policy for info in others)}) > limits.max_policies:
        bound = limits.bound
    elif limits.max_adapters is not None and len(others) >= limits.max_adapters:
        bound, remedy = f"max_loras={limits.max_adapters}", "raise max_loras, also of the server"
    if not bound:
        return
    if not others:
        message = f"expected a rollout service for several policies, got {bound}; {remedy}"
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)
    names = ", ".join(info.run for info in others)
    message = f"expected a rollout service with a place for one more policy beside {names}, got {bound}; {remedy}, or "
    raise TrackwayError(ErrorCode.CONFLICT, message + "wait until a run ends", run=others[0].run)


def check_weights(config: RunConfig, limits: PolicyLimits | None) -> None:
    """Raise INVALID_REQUEST if the rollout service cannot load what the run publishes."""
    if limits is None:
        return
    model, most, problem = config.actor_rollout_ref.model, limits.max_lora_rank, ""
    rank = 0 if model.lora.merge else model.lora_rank
    own, served = _architecture(model.path or ""), limits.architecture
    if limits.max_adapters is not None and rank == 0:
        problem = (
            "actor_rollout_ref.model.lora_rank: expected an adapter for a server that policies share (engine_shared), "
            "got whole weights; set lora_rank and lora.merge=false, or give the run a server of its own"
        )
    elif most is not None and rank > most:
        problem = (
            f"actor_rollout_ref.model.lora_rank: expected at most {most}, the rollout service's max_lora_rank, got "
            f"{rank}; lower it, or raise max_lora_rank there"
        )
    elif own and served and (different := served.different(own)):
        problem = (
            f"actor_rollout_ref.model.path: expected the architecture of the rollout service's model, got {different} "
            f"in {model.path}; train that model, or start services with this one"
        )
    if problem:
        raise TrackwayError(ErrorCode.INVALID_REQUEST, problem)


def _architecture(model: str) -> Architecture | None:
    """Return the architecture of a folder, or of a Hub id in this machine's cache. None for others."""
    file = Path(model) / "config.json"
    if not Path(model).is_dir():
        from huggingface_hub import try_to_load_from_cache
        from huggingface_hub.utils import HFValidationError

        with suppress(HFValidationError):
            cached = try_to_load_from_cache(model, "config.json")
            file = Path(cached) if isinstance(cached, str) else file
    return Architecture.parsed(file.read_text()) if file.is_file() else None
