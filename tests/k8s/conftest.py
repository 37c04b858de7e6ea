"""The base, every overlay, and the base with what else lies in k8s/ and an Ingress, rendered once."""

from pathlib import Path

import pytest

from tests.k8s.checks.render import Render, folders, rendered
from tests.k8s.checks.secrets import made_by

K8S = Path(__file__).parents[2] / "k8s"
EXTENDED = Path(__file__).parent / "extended"


@pytest.fixture(scope="session")
def renders() -> dict[str, Render]:
    """By name."""
    secrets = made_by(K8S / "secrets.sh")
    made = [rendered(folder, secrets) for folder in (*folders(K8S), EXTENDED)]
    assert all(isinstance(render, Render) for render in made), made
    return {render.name: render for render in made if isinstance(render, Render)}
