"""Check that the services have loaded the own code that a run names, and record its version.

A run whose scorer or modules are not loaded would train on another reward.
"""

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path

from pydantic import SecretStr

from trackway.clients import CallPolicy, ServiceClient
from trackway.run_config import RunConfig
from trackway.wire.base import run_of_functions
from trackway.wire.errors import TrackwayError
from trackway.wire.service import Health, OwnCode

_HEALTH_POLICY = CallPolicy.question(5.0, attempts=2)
SERVICES = ("agent", "tools", "reward")
"""The services that load own code."""

REMEDY = "start the services with it: `trackway up` in the project's folder, or the same settings in their Serve config"


async def health_of(
    services: Sequence[str], urls: Mapping[str, str], token: SecretStr | None = None
) -> dict[str, Health]:
    """`/health` of each of these services that has an URL and answers."""

    async def ask(service: str) -> Health | None:
        client = ServiceClient(urls[service], policy=_HEALTH_POLICY, token=token)
        try:
            return await client.call("GET", "/health", reply=Health)
        except TrackwayError:
            return None

    asked = [name for name in services if urls.get(name)]
    answers = await asyncio.gather(*map(ask, asked))
    return {name: answer for name, answer in zip(asked, answers, strict=True) if answer is not None}


async def loaded_code(urls: Mapping[str, str], token: SecretStr | None = None) -> dict[str, OwnCode | None]:
    """The own code of each of these services (name -> URL) that answers, or None for a service without any."""
    return {name: health.code for name, health in (await health_of(SERVICES, urls, token)).items()}


def not_loaded(config: RunConfig, code: Mapping[str, OwnCode | None]) -> list[str]:
    """A sentence for each module, scorer and file of agent loops of the run that a service has not loaded.

    Adds one for functions of another run that the services call, since these would score this run.
    """
    rollout = config.actor_rollout_ref.rollout
    files = [
        ("custom_reward_function.path", "reward", config.custom_reward_function.path),
        ("actor_rollout_ref.rollout.agent.agent_loop_config_path", "agent", rollout.agent.agent_loop_config_path),
        ("trackway.functions_file", "tools", config.trackway.functions_file),
        ("trackway.functions_file", "reward", config.trackway.functions_file),
    ]
    problems = []
    for service, own in code.items():
        modules = own.modules if own else []
        missing = [name for name in config.trackway.modules or () if name not in modules]
        if missing:
            got = ", ".join(modules) or "none"
            problems.append(
                f"trackway.modules: expected the {service} service to have loaded {', '.join(missing)}, it has loaded "
                f"{got}; {REMEDY}"
            )
    for key, service, path in files:
        own = code.get(service)
        if path is not None and service in code and Path(path).name not in (own.files if own else []):
            problems.append(f"{key}: expected the {service} service to have loaded {path}, it has not; {REMEDY}")
    its = config.trackway.functions_file and Path(config.trackway.functions_file).name
    loaded = {name for own in code.values() if own for name in own.files if name != its}
    for run in sorted(filter(None, map(run_of_functions, loaded))):
        problem = f"expected tools and a reward service without functions of another Python process, got those of {run}"
        remedy = "end it there with wait() or stop(), or start the services again: `trackway down`, `trackway up`"
        problems.append(f"{problem}; {remedy}")
    return problems
