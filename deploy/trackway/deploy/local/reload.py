"""Development: services get changes of own code; only those whose code changed are restarted."""

import time
from collections.abc import Callable, Iterator, Sequence
from threading import Event
from typing import Any

import watchfiles

from trackway.deploy.config import serve_config
from trackway.deploy.config.code_versions import own_code, watched, with_versions
from trackway.deploy.deployment.processes import Report
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ServeApi, service_statuses
from trackway.system.process import UserError

RESTART_S = 180.0
"""Longest wait for restarted services."""
_POLL_S = 0.3
_WATCH_MS = 500


def changes(config: dict[str, Any], stop: Event | None = None) -> Iterator[None]:
    """One item once the watch has begun, and one for each change of own code that the config names, until `stop`.

    Raises:
        UserError: the config names no own code.
    """
    paths = watched(config)
    if not paths:
        raise UserError(
            "--reload: expected own code to watch (trackway.modules, custom_reward_function.path, "
            "agent_loop_config_path, tool_config_path, function_tool_path), got none; start without it"
        )
    is_first = True
    for found in watchfiles.watch(
        *paths, stop_event=stop, raise_interrupt=True, yield_on_timeout=True, rust_timeout=_WATCH_MS
    ):
        if found or is_first:
            yield
        is_first = False


def reload(
    deployment: Deployment,
    report: Report,
    config: dict[str, Any] | None = None,
    active_runs: Callable[[], Sequence[str]] = list,
) -> list[str]:
    """Restart the services whose own code changed, and wait until they are ready. Returns their names.

    config: replaces the deployment's Serve config; own code may differ, and nothing else.
    active_runs: returns the names of runs whose code must not change.

    Raises:
        UserError: there are such runs, or a service does not start with its new code, or not in time.
    """
    before, after = deployment.serve_config, with_versions(config or deployment.serve_config)
    names = [name for name in own_code(after) if _version(before, name) != _version(after, name)]
    if not names:
        return []
    if runs := active_runs():
        raise UserError(
            f"{', '.join(names)}: expected no active run to restart changed services, got {', '.join(runs)}; save a "
            "file again once it has ended, or start with --reload --during-runs"
        )
    replicas = _replicas(deployment, names)
    ServeApi(deployment.dashboard_url, deployment.token).deploy(after)
    deployment.serve_config = after
    deployment.save()
    for name in names:
        report(name, "restarting")
    _wait(deployment, names, replicas, report)
    return names


def _version(config: dict[str, Any], service: str) -> object:
    return serve_config.args_of(config, service).get("code_version")


def _replicas(deployment: Deployment, names: Sequence[str]) -> set[str]:
    statuses = service_statuses(deployment)
    return {replica.health.replica for status in statuses if status.service in names for replica in status.replicas}


def _wait(deployment: Deployment, names: Sequence[str], old: set[str], report: Report) -> None:
    deadline, waiting = time.monotonic() + RESTART_S, {*names}
    while waiting:
        for status in service_statuses(deployment):
            if status.service not in waiting:
                continue
            if status.status in ("DEPLOY_FAILED", "UNHEALTHY"):
                raise UserError(f"service {status.service} does not start with its new code:\n{status.message[-1500:]}")
            replicas = status.replicas
            if replicas and all(replica.ready.ready and replica.health.replica not in old for replica in replicas):
                report(status.service, "ready")
                waiting.discard(status.service)
        if time.monotonic() > deadline:
            raise UserError(f"{', '.join(sorted(waiting))}: expected a restart within {RESTART_S:.0f} s, got none")
        time.sleep(_POLL_S)
