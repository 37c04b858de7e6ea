"""podman on this machine: one network, its addresses of a documentation range, and the pods that a test starts."""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.k8s.checks.model import Object

PODMAN = Path(__file__).resolve().parents[2] / "deploy" / "docker" / "podman.sh"
SUBNET = "198.51.100.0/24"
_LABEL = "trackway.io/made-by=test-pods"
"""Of the network and the pods. Names and addresses are fixed, so there is one such set on a machine."""


class Podman:
    """Pods on one network; `remove` ends them and the network, and so does the start of the next such test."""

    def __init__(self, network: str) -> None:
        self._network = network
        self.remove()
        self._run("network", "create", "--label", _LABEL, "--subnet", SUBNET, network)

    def play(self, pod: Object, address: str, init_s: float = 300.0) -> None:
        """Start a pod. Its init containers run before, each as a pod of its own: podman 4.3 does not wait for them."""
        spec = pod["spec"]
        for init in spec.pop("initContainers", []):
            name = f"{pod['metadata']['name']}-init"
            alone = {**spec, "containers": [init], "restartPolicy": "Never"}
            self._play({**pod, "metadata": {"name": name}, "spec": alone}, address)
            assert self.ended(f"{name}-{init['name']}", init_s) == 0, self.log(f"{name}-{init['name']}")
            self._run("pod", "rm", "--force", name)
        self._play(pod, address)

    def ended(self, container: str, seconds: float) -> int:
        """The exit status of a container that ends by itself."""
        self.wait("its end", container, lambda: not self.inspect(container)["State"]["Running"], seconds)
        return self.inspect(container)["State"]["ExitCode"]

    def _play(self, pod: Object, address: str) -> None:
        name, value = _LABEL.split("=")
        metadata = {**pod["metadata"], "labels": {**pod["metadata"].get("labels", {}), name: value}}
        pod = {**pod, "metadata": metadata}
        self._run("kube", "play", "--network", self._network, "--ip", address, "-", stdin=yaml.safe_dump(pod))

    def exec(self, container: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container."""
        return subprocess.run([PODMAN, "exec", container, *command], capture_output=True, text=True, check=False)

    def inspect(self, container: str) -> dict[str, Any]:
        """What podman says of a container."""
        return json.loads(self._run("inspect", container))[0]

    def wait(self, what: str, of: str, holds: Callable[[], bool], seconds: float) -> None:
        """Until something holds; with the end of a container's log when it does not."""
        end = time.monotonic() + seconds
        while not holds():
            if time.monotonic() > end:
                raise AssertionError(f"{what}: not within {seconds:.0f} s; {of} said\n{self.log(of)}")
            time.sleep(1.0)

    def run(self, image: str, command: Sequence[str]) -> "subprocess.CompletedProcess[str]":
        """Run a command in a container of its own, without network and without a place to write."""
        options = ["--rm", "--read-only", "--read-only-tmpfs=false", "--network=none", "--cap-drop=all"]
        words = [PODMAN, "run", *options, f"--entrypoint={command[0]}", image, *command[1:]]
        return subprocess.run(words, capture_output=True, text=True, check=False)

    def log(self, container: str) -> str:
        """The end of a container's output."""
        said = subprocess.run([PODMAN, "logs", "--tail", "40", container], capture_output=True, text=True, check=False)
        return said.stdout + said.stderr

    def stop(self, pod: str, seconds: int) -> None:
        """SIGTERM, and after that time SIGKILL."""
        self._run("pod", "stop", "--time", str(seconds), pod)

    def remove(self) -> None:
        """End the pods and the network, those of a test that was killed too."""
        for kind, force in (("pod", ["--force", "--time", "5"]), ("network", ["--force"])):
            for name in self._run(kind, "ls", "--quiet", "--filter", f"label={_LABEL}").split():
                subprocess.run([PODMAN, kind, "rm", *force, name], capture_output=True, check=False)

    def _run(self, *arguments: str, stdin: str | None = None) -> str:
        done = subprocess.run([PODMAN, *arguments], input=stdin, capture_output=True, text=True, check=False)
        if done.returncode:
            raise AssertionError(f"podman {' '.join(arguments[:3])}: {done.stderr.strip()}")
        return done.stdout
