"""Check the rendered manifests without a cluster: what the API server, KubeRay and Ray would refuse or silently ignore.

    .venv/bin/python -m tests.k8s.check                      # the base and every overlay
    .venv/bin/python -m tests.k8s.check k8s/overlays/gpu     # one of them

One line a fault, `overlay: Kind/name: path: expected ..., got ...; remedy`; exit status 1 when there is one.
"""

import argparse
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.k8s.checks.model import Fault
from tests.k8s.checks.render import folders, rendered
from tests.k8s.checks.run import NAMES, Found, found
from tests.k8s.checks.secrets import made_by

K8S = Path(__file__).parents[2] / "k8s"


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", nargs="*", type=Path, help="folders with a kustomization.yaml; all by default")
    start, faults, objects = time.monotonic(), 0, 0
    chosen = parser.parse_args(arguments).folder or folders(K8S)
    try:
        secrets = made_by(K8S / "secrets.sh")
    except subprocess.CalledProcessError as error:
        print(f"secrets.sh: expected a script that runs without a cluster, got: {error.stderr.strip()}")
        return 1
    for folder in chosen:
        render = rendered(folder, secrets)
        results = [Found(folder.name, "rendering", render)] if isinstance(render, Fault) else found(render)
        objects += 0 if isinstance(render, Fault) else len(render.objects)
        faults += len(results)
        for result in results:
            print(result)
    took = time.monotonic() - start
    print(f"{len(chosen)} renders, {objects} objects, {1 + len(NAMES)} checks: {faults} faults ({took:.1f} s)")
    return int(faults > 0)


if __name__ == "__main__":
    sys.exit(main())
