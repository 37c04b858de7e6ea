"""`make test-kubernetes` without a cluster: what of the guides it runs, what not, and in which words."""

import ast
import os
from pathlib import Path

import pytest

from tests.k8s.checks.pods import Pod
from tests.k8s.checks.quantity import quantity
from tests.k8s.checks.render import Render, rendered
from tests.k8s.checks.run import found
from tests.k8s.checks.secrets import made_by
from tests.k8s.live.guide import OVERLAY, ROOT, command, documented, run

pytestmark = pytest.mark.manifests

NOT_RUN = {
    "kubectl label node NODE": "GPU nodes",
    "kubectl apply -k k8s/overlays/mine": "GPU nodes",
    "kubectl apply -f k8s/once/loader.yaml": "GPU nodes: models and data",
    "kubectl -n trackway wait --for=jsonpath": "GPU nodes: models and data",
    "kubectl -n trackway exec job/trackway-loader -- mkdir": "GPU nodes: models and data",
    "tar -C ~/models/policy": "GPU nodes: models and data",
    "kubectl -n trackway exec job/trackway-loader -- trackway": "GPU nodes: models and data",
    "kubectl delete -f k8s/once/loader.yaml": "GPU nodes: models and data",
    "kubectl -n trackway create secret generic trackway-wandb": "W&B",
    "kubectl -n trackway patch raycluster NAME": "the quick start has one pod of a group",
    "kubectl -n trackway get raycluster --watch": "for eyes",
    "kubectl -n trackway delete pod trackway-redis-0": "Redis",
    "kubectl -n trackway delete pod trackway-otel-collector-0": "W&B",
}


def taken() -> set[str]:
    """The documented commands that the test takes, each once in the guides."""
    tree = ast.parse(Path(__file__).with_name("test_cluster.py").read_text())
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    given = [
        node for call in calls if getattr(call.func, "id", "") in ("run", "forwarded", "script") for node in call.args
    ]
    words = [node.value for argument in given for node in ast.walk(argument) if isinstance(node, ast.Constant)]
    return {command(word) for word in words if isinstance(word, str)}


def test_every_documented_command_is_run_or_has_a_reason_why_not() -> None:
    of_kubernetes = {words for words in documented() if "kubectl" in words or words.startswith("helm")}
    left = {command(start) for start in NOT_RUN}
    assert not taken() & left
    assert of_kubernetes - taken() == left


def requested(pods: list[Pod], resource: str) -> float:
    return sum(
        quantity(container.spec["resources"]["requests"][resource])
        for pod in pods
        for container in pod.containers
        if not container.init
    )


def test_the_small_overlay_has_no_fault_and_an_upgrade_fits_two_cores_and_12_gb_beside_kubernetes() -> None:
    render = rendered(ROOT / OVERLAY, made_by(ROOT / "k8s/secrets.sh"))
    assert isinstance(render, Render), render
    assert [str(result) for result in found(render)] == []
    staying = [pod for pod in render.pods if not pod.owner.startswith("Job/")]
    twice = [*staying, *(pod for pod in staying if pod.group)]
    assert requested(twice, "cpu") < 0.9
    assert requested(twice, "memory") < 11e9


def test_a_command_runs_in_the_words_of_the_guide_on_the_small_overlay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kubectl = tmp_path / "kubectl"
    kubectl.write_text('#!/bin/sh\nfor word in "$@"; do echo "$word"; done\n')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    applied = run("kubectl apply -k k8s/overlays/cpu-quickstart").splitlines()
    patched = run("kubectl -n trackway patch rayservice trackway ... suspend").splitlines()

    assert applied == ["apply", "-k", "tests/k8s/live/small"]
    assert patched[-2:] == ["-p", '{"spec":{"suspend":true}}']
