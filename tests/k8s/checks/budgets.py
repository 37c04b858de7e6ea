"""PodDisruptionBudgets: Kubernetes can evaluate them, and they do not block a drain."""

from collections.abc import Iterator

from ray.serve.config import AutoscalingConfig
from ray.serve.schema import DeploymentSchema

from tests.k8s.checks.model import Fault, part, title
from tests.k8s.checks.placement import held
from tests.k8s.checks.pods import Pod
from tests.k8s.checks.render import Render
from tests.k8s.checks.selectors import matches


def faults(render: Render) -> Iterator[Fault]:
    """Budgets that Kubernetes cannot evaluate for Ray's pods, and budgets that never allow an eviction."""
    for budget in render.of("PodDisruptionBudget"):
        where, least = title(budget), part(budget, "spec.minAvailable")
        chosen = [pod for pod in render.pods if matches(part(budget, "spec.selector") or {}, pod.labels)]
        if any(pod.group for pod in chosen) and type(least) is not int:
            got = f"minAvailable {least}" if least else f"maxUnavailable {part(budget, 'spec.maxUnavailable')}"
            remedy = "a RayCluster has no scale subresource to count others by: then no pod may be evicted"
            yield Fault(where, "spec", "minAvailable as a number, for Ray's pods", got, remedy)
        fewest = sum(_fewest(render, pod) for pod in chosen)
        if type(least) is int and 0 < fewest <= least:
            expected = f"fewer than there may be at the least ({fewest})"
            yield Fault(where, "spec.minAvailable", expected, str(least), "else no pod may ever be evicted")


def _fewest(render: Render, pod: Pod) -> int:
    """The least number of pods of the template, if each holds one replica of a service."""
    if pod.group:
        return max((_fewest_replicas(deployment) for _, deployment in held(render, pod)), default=0)
    replicas = part(render.find(*pod.owner.split("/")), "spec.replicas")
    return 1 if replicas is None else replicas


def _fewest_replicas(deployment: DeploymentSchema) -> int:
    scaling = deployment.autoscaling_config
    if isinstance(scaling, dict):
        return AutoscalingConfig.model_validate(scaling).min_replicas
    return deployment.num_replicas if type(deployment.num_replicas) is int else 1
