"""Termination of Ray pods: replicas finish their requests within the pod's grace period."""

from collections.abc import Iterator

from ray.serve.schema import DeploymentSchema

from tests.k8s.checks.model import Fault, part, title
from tests.k8s.checks.placement import held
from tests.k8s.checks.pods import Pod
from tests.k8s.checks.render import Render
from tests.k8s.checks.serve import configs

_COMMAND = "trackway.deploy.drain"
_FLAG = "--timeout"
_SERVES_DEFAULT_S = 20.0
_KUBERNETES_DEFAULT_S = 30
_KUBERAYS_DEFAULT_S = 60


def faults(render: Render) -> Iterator[Fault]:
    """Worker pods without a drain, and times in the wrong order: replica shutdown < drain < the pod's grace period."""
    for config in configs(render):
        longest = max((_shutdown(deployment) for _, deployment in config.deployments()), default=0.0)
        delay = part(config.service, "spec.rayClusterDeletionDelaySeconds") or _KUBERAYS_DEFAULT_S
        if delay < longest:
            path, remedy = "spec.rayClusterDeletionDelaySeconds", "an upgrade's old cluster ends its requests first"
            yield Fault(title(config.service), path, f"at least {longest:g}, the longest shutdown", str(delay), remedy)
        for pod in render.pods:
            if pod.owner == title(config.service):
                yield from _of_group(render, pod)


def _of_group(render: Render, pod: Pod) -> Iterator[Fault]:
    deployments = [deployment for _, deployment in held(render, pod)]
    if not deployments or pod.ray is None:
        return
    longest = max(deployments, key=_shutdown)
    path = f"{pod.ray.path}.lifecycle.preStop.exec.command"
    command = [str(word) for word in part(pod.ray.spec, "lifecycle.preStop.exec.command") or []]
    try:
        drain = float(command[command.index(_FLAG) + 1]) if _COMMAND in " ".join(command) else None
    except (ValueError, IndexError):
        drain = None
    if drain is None:
        said = " ".join(command) or "none"
        yield Fault(pod.owner, path, f"python -m {_COMMAND} {_FLAG} SECONDS", said, "drain the node before it ends")
        return
    if drain <= _shutdown(longest):
        expected = f"more than {_shutdown(longest):g}, the graceful_shutdown_timeout_s of {longest.name}"
        yield Fault(pod.owner, path, expected, f"{drain:g}", "drain longer")
    grace = pod.spec.get("terminationGracePeriodSeconds", _KUBERNETES_DEFAULT_S)
    if grace <= drain:
        grace_path = f"{pod.path}.spec.terminationGracePeriodSeconds"
        yield Fault(pod.owner, grace_path, f"more than the drain, {drain:g}", str(grace), "give the pod longer")


def _shutdown(deployment: DeploymentSchema) -> float:
    said = deployment.graceful_shutdown_timeout_s
    return float(said) if isinstance(said, float | int) else _SERVES_DEFAULT_S
