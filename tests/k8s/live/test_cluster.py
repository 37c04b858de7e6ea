"""The quick start on the cluster of kubectl's context, from the guide's first command to its last, in this order.

Each `run` and `forwarded` takes a command of docs/guides/kubernetes as it stands there (`guide.py`). What the cluster
lacks is skipped by name. Redis and W&B, whose Secrets are rotated alike, are in other overlays.
"""

import asyncio
import json
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from tenacity import retry, retry_if_exception_type, stop_after_delay, wait_fixed

from tests.k8s.checks.render import folders
from tests.k8s.live.guide import OVERLAY, ROOT, forwarded, run, script, secret, shell

pytestmark = [pytest.mark.kubernetes, pytest.mark.timeout(1200)]

SERVE = "http://127.0.0.1:8000"
PATCH = "kubectl -n trackway patch"
EXPERIMENTS = "http://127.0.0.1:5000/api/2.0/mlflow/experiments/search?max_results=100"
until = retry(
    stop=stop_after_delay(600),
    wait=wait_fixed(2),
    retry=retry_if_exception_type((AssertionError, httpx.HTTPError)),
    reraise=True,
)
"""Repeats a check until it holds, for ten minutes at most."""


@pytest.fixture(scope="module", autouse=True)
def cluster() -> None:
    """Take only a cluster without Trackway: the last test deletes the namespace with all its volumes."""
    there = subprocess.run(["kubectl", "get", "namespace", "trackway"], capture_output=True, text=True, timeout=60)
    assert there.returncode, "expected a cluster without the namespace trackway, got one with it; use another cluster"
    if "NotFound" not in there.stderr:
        pytest.skip(f"no cluster in kubectl's context: {there.stderr.strip()}")
    if not has("crd", "rayservices.ray.io"):
        assert shutil.which("helm"), "expected KubeRay in the cluster or helm on PATH, got neither; install helm"
        run("helm repo add", "helm install")
    run("kubectl apply -f k8s/base/namespace.yaml", "bash k8s/secrets.sh")


@pytest.fixture(scope="module")
def quickstart() -> None:
    """The quick start, applied, with its demo trained."""
    run("kubectl apply -k k8s/overlays/cpu-quickstart", "kubectl -n trackway get rayservice,pods")
    shell("kubectl -n trackway wait --for=condition=Complete job/trackway-demo --timeout=15m", 960)


@pytest.fixture
def outside(quickstart: None) -> Iterator[None]:
    """Ports of the services, the head and MLflow."""
    with ExitStack() as stack:
        stack.enter_context(forwarded("kubectl -n trackway port-forward svc/trackway-serve-svc", 8000))
        stack.enter_context(forwarded("kubectl -n trackway port-forward svc/trackway-head-svc", 8265))
        stack.enter_context(forwarded("kubectl -n trackway port-forward svc/trackway-mlflow", 5000))
        yield


def has(kind: str, name: str) -> bool:
    """Whether the cluster has this object."""
    return subprocess.run(["kubectl", "get", kind, name], capture_output=True, timeout=60).returncode == 0


def call(method: str, path: str, key: str | None, body: object = None) -> httpx.Response:
    """A request to the forwarded port, with one of the tokens."""
    headers = {"Authorization": f"Bearer {secret('trackway-tokens', key)}"} if key else {}
    return httpx.request(method, f"{SERVE}{path}", headers=headers, json=body, timeout=60, trust_env=False)


@until
def calculates() -> None:
    """A tool answers, through a port that is forwarded to a pod of now."""
    with forwarded("kubectl -n trackway port-forward svc/trackway-serve-svc", 8000):
        body = {"arguments": {"expression": "12*7"}}
        answer = call("POST", "/tools/tools/calculator/execute", "client-token", body)
    assert answer.json()["text"] == "84", answer.text


def start_run(name: str) -> None:
    """A run of minutes, of the demo's kind."""
    config: dict[str, Any] = {
        "data.train_files": "/var/lib/trackway/data/train.parquet",
        "data.train_batch_size": 8,
        "data.max_prompt_length": 96,
        "data.max_response_length": 64,
        "actor_rollout_ref.model.path": "/opt/trackway/examples/tiny/checkpoint",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.multi_turn.enable": True,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "trainer.total_training_steps": 300,
        "trainer.experiment_name": name,
    }
    with forwarded("kubectl -n trackway port-forward svc/trackway-serve-svc", 8000):
        call("POST", "/trainer/runs", "token", {"config": config}).raise_for_status()


def state_of(name: str) -> tuple[str, int]:
    with forwarded("kubectl -n trackway port-forward svc/trackway-serve-svc", 8000):
        found = call("GET", f"/trainer/runs/{name}", "token").raise_for_status().json()
    return found["state"], found["step"]


@until
def ends(name: str) -> None:
    assert state_of(name) == ("finished", 300)


@pytest.mark.parametrize("folder", folders(ROOT / "k8s"), ids=lambda folder: folder.name)
def test_the_api_server_takes_every_overlay(folder: Path) -> None:
    shell(f"kubectl apply --dry-run=server --validate=strict -k {folder}")


def test_the_api_server_takes_what_prometheus_operator_reads() -> None:
    if not has("crd", "scrapeconfigs.monitoring.coreos.com"):
        pytest.skip("the cluster lacks Prometheus' operator")
    shell("kubectl apply --dry-run=server --validate=strict -f k8s/monitoring/prometheus-operator.yaml")


def test_the_tool_server_alone_scales_on_its_cpus() -> None:
    if not has("apiservice", "v1beta1.metrics.k8s.io"):
        pytest.skip("the cluster lacks a metrics server")
    shell("kubectl apply -k k8s/overlays/tools-alone")
    shell("kubectl -n trackway wait --for=condition=Available deployment/trackway-tools-alone --timeout=5m")
    shell("kubectl -n trackway wait --for=condition=ScalingActive hpa/trackway-tools-alone --timeout=5m")
    shell("kubectl delete -k k8s/overlays/tools-alone")


def test_the_demo_learns_and_its_traces_are_complete(quickstart: None) -> None:
    assert run("kubectl -n trackway logs -f job/trackway-demo -c attach")
    assert run("kubectl -n trackway logs -f job/trackway-demo -c demo")
    file = "/var/lib/trackway/demo/summary.json"
    summary = json.loads(shell(f"kubectl -n trackway exec deploy/trackway-console -- cat {file}"))
    assert summary["failed_trajectories"] == 0
    assert summary["complete_traces"] == summary["traced"] > 0
    assert summary["accuracy_after"] > summary["accuracy_before"] + 0.3


def test_tools_console_and_mlflow_answer_from_outside_with_a_token(outside: None) -> None:
    body = {"arguments": {"expression": "12*7"}}
    assert call("POST", "/tools/tools/calculator/execute", None, body).status_code == 401
    assert call("POST", "/tools/tools/calculator/execute", "client-token", body).json()["text"] == "84"
    assert httpx.get(EXPERIMENTS, timeout=60, trust_env=False).json()["experiments"]
    token = run("kubectl -n trackway get secret trackway-tokens -o jsonpath='{.data.client-token}'")
    with forwarded("kubectl -n trackway port-forward svc/trackway-console", 8100):
        runs = "http://127.0.0.1:8100/api/runs"
        assert httpx.get(runs, timeout=60, trust_env=False).status_code == 401
        assert httpx.get(runs, headers={"Authorization": f"Bearer {token}"}, timeout=60, trust_env=False).json()["runs"]


def test_postgresql_is_closed_to_the_console(quickstart: None) -> None:
    ask = "import socket; socket.create_connection(('trackway-postgres', 5432), 5)"
    command = ["kubectl", "-n", "trackway", "exec", "deploy/trackway-console", "--", "python", "-c", ask]
    if subprocess.run(command, capture_output=True, timeout=60).returncode == 0:
        pytest.skip("the cluster's network plugin does not enforce NetworkPolicies")


def test_an_overlay_applied_twice_changes_nothing(quickstart: None) -> None:
    run("kubectl apply -k OVERLAY")
    shell(f"kubectl diff -k {OVERLAY}")


def replicas() -> int:
    return len(call("GET", "/rollout/replicas", "token").raise_for_status().json()["replicas"])


async def under_load(calls: int) -> None:
    """Keep so many calls of the rollout service open until it has a second replica."""
    ended = asyncio.Event()
    headers = {"Authorization": f"Bearer {secret('trackway-tokens', 'token')}"}
    limits = httpx.Limits(max_connections=calls)

    async def repeat(client: httpx.AsyncClient) -> None:
        while not ended.is_set():
            await client.post("/rollout/v1/completions", json={"model": "policy", "prompt": "1+1=", "max_tokens": 64})

    async with httpx.AsyncClient(
        base_url=SERVE, headers=headers, timeout=600, limits=limits, trust_env=False
    ) as client:
        callers = [asyncio.create_task(repeat(client)) for _ in range(calls)]
        try:
            async with asyncio.timeout(300):
                while await asyncio.to_thread(replicas) < 2:
                    await asyncio.sleep(2)
        finally:
            ended.set()
            await asyncio.gather(*callers, return_exceptions=True)


def test_rollout_is_scaled_alone_by_its_load_and_by_hand(outside: None, tmp_path: Path) -> None:
    assert replicas() == 1
    asyncio.run(under_load(200))
    attach = script("export TRACKWAY_TOKEN=", "export RAY_AUTH_TOKEN=", "trackway attach --base-url")
    shell(f"{attach} --outputs {tmp_path}\ntrackway scale rollout 1 --outputs {tmp_path}")
    assert replicas() == 1


def test_a_run_goes_on_through_an_upgrade_that_rotates_the_services_token(quickstart: None) -> None:
    before = secret("trackway-tokens", "token")
    start_run("upgraded")
    run(
        *("known=", "new=", "kubectl -n trackway patch secret trackway-tokens ... tokens.json"),
        *("sleep 120", "kubectl -n trackway patch secret trackway-tokens ... token: "),
        "kubectl -n trackway patch rayservice trackway ... annotations",
    )
    assert secret("trackway-tokens", "token") != before
    assert state_of("upgraded")[0] == "running", (
        "expected a run that lasts longer than the rotation; give it more steps"
    )
    ends("upgraded")


def test_a_run_goes_on_after_a_pause_in_which_rays_token_is_rotated(quickstart: None) -> None:
    start_run("paused")
    run(
        "kubectl -n trackway patch rayservice trackway ... suspend",
        "kubectl -n trackway wait --for=delete pod -l ray.io/is-ray-node=yes",
        deadline_s=960,
    )
    shell(f"""{PATCH} secret trackway-ray --type merge -p "{{stringData: {{auth_token: $(openssl rand -hex 32)}}}}" """)
    shell(f"""{PATCH} rayservice trackway --type merge -p '{{"spec":{{"suspend":false}}}}'""")
    ends("paused")


def test_mlflow_is_migrated_and_restored_and_its_database_gets_a_new_password(quickstart: None) -> None:
    try:
        run("kubectl -n trackway scale deployment trackway-mlflow", "kubectl -n trackway exec trackway-postgres-0")
        run("kubectl apply -f k8s/once/mlflow-upgrade.yaml", "kubectl -n trackway wait --for=condition=Complete")
        run(
            "kubectl delete -f k8s/once/mlflow-upgrade.yaml",
            "kubectl -n trackway exec -i trackway-postgres-0 ... restore",
        )
    finally:
        (ROOT / "mlflow.dump").unlink(missing_ok=True)
    run("kubectl apply -k OVERLAY")
    shell(
        f"""{PATCH} secret trackway-postgres --type merge -p "{{stringData: {{password: $(openssl rand -hex 32)}}}}" """
    )
    run("sleep 120", "kubectl -n trackway exec -i trackway-postgres-0 ... psql", "kubectl -n trackway rollout restart")
    shell("kubectl -n trackway rollout status deployment/trackway-mlflow --timeout=5m")
    with forwarded("kubectl -n trackway port-forward svc/trackway-mlflow", 5000):
        assert httpx.get(EXPERIMENTS, timeout=60, trust_env=False).json()["experiments"]


@pytest.mark.parametrize(
    "pods",
    [
        *("trackway.io/role=all", "trackway.io/role=head", "app.kubernetes.io/name=trackway-mlflow"),
        *("app.kubernetes.io/name=trackway-postgres", "app.kubernetes.io/name=trackway-otel-collector"),
        "app.kubernetes.io/name=trackway-console",
    ],
)
def test_a_deleted_pod_comes_back(quickstart: None, pods: str) -> None:
    shell(f"kubectl -n trackway delete pod -l {pods} --timeout=5m")

    @until
    def ready() -> None:
        shell(f"kubectl -n trackway wait --for=condition=Ready pod -l {pods} --timeout=1m")

    ready()
    calculates()


def test_uninstalling_leaves_nothing(quickstart: None) -> None:
    run("kubectl -n trackway delete job trackway-demo", "kubectl apply -k OVERLAY", "kubectl delete -k OVERLAY")
    shell("kubectl wait --for=delete namespace/trackway --timeout=10m", 660)
