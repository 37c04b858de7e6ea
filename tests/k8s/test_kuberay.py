"""What KubeRay makes of a RayService, as the checks see it."""

from typing import Any

import pytest

from tests.k8s.checks import kuberay
from tests.k8s.checks.quantity import quantity

pytestmark = pytest.mark.manifests


@pytest.mark.parametrize(
    ("text", "value"), [("500m", 0.5), ("2Gi", 2 * 1024**3), ("1e3", 1000), ("4", 4), (2, 2), ("819Mi", 819 * 1024**2)]
)
def test_quantities_are_read_as_kubernetes_reads_them(text: str | int, value: float) -> None:
    assert quantity(text) == value


@pytest.mark.parametrize("text", ["", "2 Gi", "2gi", "Gi", "mi"])
def test_other_words_are_no_quantities(text: str) -> None:
    with pytest.raises(ValueError, match="a quantity such as 500m or 2Gi, got"):
        quantity(text)


def group(limits: dict[str, str] | None = None, **of_group: Any) -> dict[str, Any]:
    container = {"name": "ray", "resources": {"requests": {"cpu": "1"}, "limits": limits or {}}}
    return {"groupName": "g", **of_group, "template": {"spec": {"containers": [container]}}}


@pytest.mark.parametrize(
    ("spec", "offered"),
    [
        (group(), {"CPU": 1, "GPU": 0, "memory": 0}),
        (group({"cpu": "1500m", "memory": "1Ki", "nvidia.com/gpu": "2"}), {"CPU": 2, "GPU": 2, "memory": 1024}),
        (group({"cpu": "2"}, rayStartParams={"num-cpus": "0", "num-gpus": "1"}), {"CPU": 0, "GPU": 1, "memory": 0}),
        (group({"cpu": "2"}, resources={"CPU": "4", "x": "1"}), {"CPU": 4, "GPU": 0, "memory": 0, "x": 1}),
        (group(rayStartParams={"resources": """'{"x": 2}'"""}), {"CPU": 1, "GPU": 0, "memory": 0, "x": 2}),
        (group(rayStartParams={"resources": r'"{\"x\": 2}"'}), {"CPU": 1, "GPU": 0, "memory": 0, "x": 2}),
    ],
)
def test_a_pod_offers_ray_what_kuberay_tells_it(spec: dict[str, Any], offered: dict[str, float]) -> None:
    assert kuberay.capacity(spec) == offered


@pytest.mark.parametrize("said", ['{"x": 2}', "'{x: 2}'", "'[1]'", """'{"x": null}'"""])
def test_resources_that_bash_or_ray_would_not_read_are_an_error(said: str) -> None:
    with pytest.raises(ValueError, match=r"one JSON object of numbers in quotes for bash|Expecting property name"):
        kuberay.capacity(group(rayStartParams={"resources": said}))


def service(**cluster: Any) -> dict[str, Any]:
    head = {"template": {"spec": {"containers": [{"name": "ray", "image": "ray:1"}]}}}
    config = {"headGroupSpec": head, "workerGroupSpecs": [group(maxReplicas=4, replicas=2)], **cluster}
    return {"kind": "RayService", "metadata": {"name": "a", "namespace": "n"}, "spec": {"rayClusterConfig": config}}


def test_pods_are_labelled_by_node_type_and_group_and_not_by_a_clusters_lasting_name() -> None:
    head, worker = kuberay.pods(service())
    assert (head.labels["ray.io/node-type"], head.labels["ray.io/group"]) == ("head", "headgroup")
    assert (worker.labels["ray.io/node-type"], worker.labels["ray.io/group"]) == ("worker", "g")
    assert (head.labels["ray.io/serve"], worker.labels["ray.io/serve"]) == ("true", "true")
    assert head.labels["ray.io/cluster"] == worker.labels["ray.io/cluster"] == "a-?????"


def test_a_head_that_is_left_out_of_the_service_does_not_serve() -> None:
    ray_service = service()
    ray_service["spec"]["excludeHeadPodFromServeSvc"] = True
    assert [pod.labels["ray.io/serve"] for pod in kuberay.pods(ray_service)] == ["false", "true"]


def test_a_groups_pods_are_as_many_as_the_autoscaler_may_make() -> None:
    fixed, scaled = service(), service(enableInTreeAutoscaling=True)
    [(_, _, spec)] = list(kuberay.groups(fixed))[1:]
    assert (kuberay.most_nodes(fixed, spec), kuberay.most_nodes(scaled, spec)) == (2, 4)


def test_the_services_have_the_heads_ports_and_the_default_ones_without_any() -> None:
    def ports(service: dict[str, Any]) -> list[tuple[str, list[int]]]:
        made = kuberay.services(service)
        return [(svc["metadata"]["name"], [port["port"] for port in svc["spec"]["ports"]]) for svc in made]

    ray_service = service()
    assert ports(ray_service) == [("a-head-svc", [10001, 6379, 8265, 8000, 8080]), ("a-serve-svc", [8000])]
    [container] = ray_service["spec"]["rayClusterConfig"]["headGroupSpec"]["template"]["spec"]["containers"]
    container["ports"] = [{"name": "serve", "containerPort": 9000}, {"name": "dashboard", "containerPort": 8265}]
    assert ports(ray_service) == [("a-head-svc", [9000, 8265, 8080]), ("a-serve-svc", [9000])]
