"""Start and stop of a local deployment: Ray and MLflow in parallel, then the five services.

`bring_up` returns once every service answers `/ready`. If the start fails, everything it started is stopped.
"""

import asyncio
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from trackway.clients import CallPolicy, ServiceClient, run
from trackway.clients.http_client import authorization, resolve_token
from trackway.deploy.config import serve_config
from trackway.deploy.config.code_versions import with_versions
from trackway.deploy.config.serve_config import check_engine_python
from trackway.deploy.deployment import processes
from trackway.deploy.deployment.processes import ProcessRecord, Report, answers
from trackway.deploy.deployment.record import Deployment
from trackway.deploy.deployment.serve_api import ApplicationState, ServeApi, replicas_at
from trackway.deploy.local import mlflow_server, preflight, ray_cluster
from trackway.deploy.local.access import address_of, check_access, host_of
from trackway.deploy.local.settings import UpSettings
from trackway.serving.app import REMEDY, difference, installation
from trackway.system import LockTaken, acquire_lock, free_port
from trackway.system.process import UserError
from trackway.tracing.settings import SPOOL_FOLDER
from trackway.wire.errors import TrackwayError
from trackway.wire.service import ReplicaList


def check_interpreters(deployment: Deployment) -> None:
    """Compare the installation of every replica with this process. Raises UserError or TrackwayError."""
    here = installation()
    for service in deployment.services:
        for replica in replicas_at(deployment.url(service)):
            different = difference(here, replica.health)
            if different:
                name = replica.health.replica
                raise UserError(f"{service} replica {name} runs on a different installation: {different}; {REMEDY}")


_POLL_S = 0.3


def bring_up(settings: UpSettings, report: Report, config: dict[str, Any] | None = None) -> Deployment:
    """Start everything and wait until it is ready. `config` replaces the Serve config of the settings.

    Raises:
        UserError: a precondition or the start failed; nothing is left running.
    """
    with _alone(settings.outputs):
        return _bring_up(settings, report, config)


def _bring_up(settings: UpSettings, report: Report, config: dict[str, Any] | None) -> Deployment:
    preflight.check(settings)
    config = with_versions(serve_config.load(settings.config) if config is None else config)
    check_engine_python(serve_config.args_of(config, "rollout"))
    settings = settings.model_copy(update={"outputs": settings.outputs.resolve()})
    check_access(_completed(config, settings, "", 0, ""))
    deployment = _launch(settings, config)
    deployment.save()
    try:
        _wait_until_ready(deployment, settings, report)
        if "trainer" in deployment.services:
            trainer = replicas_at(deployment.url("trainer"))[0]
            deployment.tinker_url = trainer.url or deployment.url("trainer")
            deployment.save()
    except BaseException:
        _stop(deployment)
        raise
    return deployment


@contextmanager
def _alone(outputs: Path) -> Iterator[None]:
    """Hold the start-up lock of a folder, because the deployment record is written only during the start."""
    path = Deployment.path(outputs).with_name("up.lock")
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        lock = acquire_lock(path, holder=f"process {os.getpid()}")
    except LockTaken as taken:
        raise UserError(
            f"expected no other start of services in {outputs}, got one in progress: "
            f"{taken.holder or 'another process'}; wait until it ends, stop it, or give another --outputs"
        ) from None
    try:
        yield
    finally:
        lock.release()


def take_down(deployment: Deployment, report: Report = lambda name, state: None) -> None:
    """Wait for the last spans, then stop the processes that were started, services first, and remove the record."""
    try:
        if deployment.processes:
            deliver_spans(deployment, report)
    finally:
        _stop(deployment, report)


def _stop(deployment: Deployment, report: Report = lambda name, state: None) -> None:
    for process in deployment.processes:
        report(process.name, "stopping")
        processes.stop_tree(process)
        report(process.name, "stopped")
    Deployment.path(deployment.outputs).unlink(missing_ok=True)


def _launch(settings: UpSettings, config: dict[str, object]) -> Deployment:
    port, dashboard_port, ray_port, mlflow_port = (
        port or free_port()
        for port in (settings.port, settings.dashboard_port, settings.ray_port, settings.mlflow_port)
    )
    logs = Deployment.path(settings.outputs).parent
    token = ray_cluster.new_token()
    # Before Ray: the MLflow start may be refused, and nothing must be left running then.
    mlflow_uri, mlflow = _mlflow(settings, mlflow_port)
    gpus = shared_gpus(config)
    ray = ray_cluster.start(ray_port, dashboard_port, token, logs / "ray.log", gpus)
    started = [ray, *mlflow]
    base_url = f"http://{address_of(host_of(config))}:{port}"
    return Deployment(
        base_url=base_url,
        dashboard_url=f"http://127.0.0.1:{dashboard_port}",
        token=token,
        mlflow_uri=mlflow_uri,
        outputs=settings.outputs,
        processes=started,
        serve_config=_completed(config, settings, base_url, port, mlflow_uri),
    )


def shared_gpus(config: Mapping[str, Any]) -> dict[str, str]:
    """The variable that hides from Ray, and so from the learner, the GPUs that deployments have to themselves."""
    own = serve_config.own_gpus(config)
    if not own:
        return {}
    from trackway.deploy.config.services_for_run import gpus_here, visible_gpus  # they import torch

    return {serve_config.VISIBLE: ",".join(name for name in visible_gpus(gpus_here()) if name not in own)}


def _mlflow(settings: UpSettings, port: int) -> tuple[str, list[ProcessRecord]]:
    """The address of MLflow, and its process if one was started."""
    database = settings.mlflow_database
    if database is None:
        return str(settings.mlflow_uri), []
    return f"http://127.0.0.1:{port}", [mlflow_server.start(database, port)]


def _completed(
    config: dict[str, object], settings: UpSettings, base_url: str, port: int, mlflow_uri: str
) -> dict[str, object]:
    weights_url = str(settings.outputs / "weights")
    model_path = str(settings.model_path.resolve())
    auth = {} if settings.tokens_file is None else {"auth": {"tokens_file": str(settings.tokens_file.resolve())}}
    return serve_config.complete(
        config,
        host=host_of(config),
        port=port,
        # Replicas get API keys from the environment of the Ray process, so that no file contains them.
        common={
            "base_url": base_url,
            "tracing": {"mlflow_uri": mlflow_uri, "spool_dir": str(settings.outputs / SPOOL_FOLDER)},
            **auth,
        },
        per_service={
            "rollout": {"model_path": model_path, "weights_url": weights_url},
            "agent": {"model_path": model_path},
            "trainer": {
                "outputs_dir": str(settings.outputs),
                "weights_url": weights_url,
                "direct_port": free_port(),  # the same after a restart, for Tinker's SDK
            },
        },
    )


def _wait_until_ready(deployment: Deployment, settings: UpSettings, report: Report) -> None:
    deadline = time.monotonic() + settings.start_timeout_s
    api = ServeApi(deployment.dashboard_url, deployment.token)
    report("ray", "starting")
    _wait(deployment, settings, api.answers, "ray", deadline, report)
    report("ray", "ready")
    api.deploy(deployment.serve_config)
    waiting = set(deployment.services)
    mlflow_waits = settings.mlflow_database is not None
    while waiting or mlflow_waits:
        for process in deployment.processes:
            processes.check_alive(process)
        if mlflow_waits and mlflow_server.answers(deployment.mlflow_uri):
            report("mlflow", "ready")
            mlflow_waits = False
        states = api.applications()
        for service in sorted(waiting):
            if _service_ready(deployment, states.get(service), service, report):
                waiting.discard(service)
        late = sorted(waiting | ({"mlflow"} if mlflow_waits else set()))
        _pause(deadline, ", ".join(late), deployment.outputs)
    check_interpreters(deployment)


def _wait(
    deployment: Deployment,
    settings: UpSettings,
    done: Callable[[], bool],
    name: str,
    deadline: float,
    report: Report,
    retries: int = 1,
) -> None:
    """Wait until `done`. A Ray process that exits during start-up, as on a busy machine, is restarted once."""
    while not done():
        for position, process in enumerate(deployment.processes):
            if process.name == name and process.find() is None and retries > 0:
                retries -= 1
                report(name, f"did not start ({process.log}); retrying once")
                deployment.processes[position] = _again(deployment, settings)
                deployment.save()
            else:
                processes.check_alive(process)
        _pause(deadline, name, deployment.outputs)


def _again(deployment: Deployment, settings: UpSettings) -> ProcessRecord:
    port = httpx.URL(deployment.dashboard_url).port or 8265
    log = Deployment.path(deployment.outputs).parent / "ray-retry.log"
    gpus = shared_gpus(deployment.serve_config)
    return ray_cluster.start(free_port(), port, deployment.token, log, gpus)


def _service_ready(deployment: Deployment, state: ApplicationState | None, service: str, report: Report) -> bool:
    if state is None:
        return False
    if state.status in ("DEPLOY_FAILED", "UNHEALTHY"):
        raise UserError(f"service {service} did not start:\n{state.message[-1500:]}")
    if state.status == "RUNNING" and answers(f"{deployment.url(service)}/ready", authorization(resolve_token())):
        report(service, "ready")
        return True
    report(service, "loading" if state.status == "RUNNING" else "starting")
    return False


def _pause(deadline: float, waiting_for: str, outputs: Path) -> None:
    if time.monotonic() > deadline:
        logs = Deployment.path(outputs).parent
        raise UserError(
            f"{waiting_for} did not answer in time; see the logs in {logs} and /tmp/ray/session_latest/logs"
        )
    time.sleep(_POLL_S)


STALLED_S = 30.0
"""The wait ends after so long without a delivered span. A request to a backend may take as long."""
LONGEST_S = 120.0
_SPANS_POLL_S = 0.3
_ASK = CallPolicy.question(5.0)


def deliver_spans(deployment: Deployment, report: Report) -> int:
    """Wait until every replica's spans are delivered, while any are. The number that are left."""
    began = since = time.monotonic()
    fewest = left = spans_waiting(deployment)
    if not left:
        return 0
    while left and time.monotonic() < min(since + STALLED_S, began + LONGEST_S):
        report("spans", f"sending {left}")
        time.sleep(_SPANS_POLL_S)
        left = spans_waiting(deployment)
        if left < fewest:
            fewest, since = left, time.monotonic()
    report("spans", "left on disk" if left else "sent")
    return left


def spans_waiting(deployment: Deployment) -> int:
    """The spans that the replicas still have to deliver. A service that does not answer counts as 0."""

    async def ask() -> int:
        return sum(await asyncio.gather(*(_waiting(deployment.url(name)) for name in deployment.services)))

    return run(ask())


async def _waiting(url: str) -> int:
    try:
        listed = await ServiceClient(url, policy=_ASK).call("GET", "/replicas", reply=ReplicaList)
    except TrackwayError:
        return 0
    return sum(replica.health.spans.waiting for replica in listed.replicas)
