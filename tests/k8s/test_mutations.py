"""Break one thing in a rendered overlay: the check whose subject it is finds it and says so, and no other does."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from breaking import broken

from checks.model import Fault
from checks.render import Render, folders, rendered
from checks.run import NAMES, found

pytestmark = pytest.mark.manifests

ROOT = Path(__file__).parents[2]
MUTATIONS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mutations.yaml").read_text())
PLACES: dict[str, str] = MUTATIONS.pop("places")
CASES = [(check, name, how) for check, cases in MUTATIONS.items() for name, how in cases.items()]


@pytest.mark.parametrize("overlay", [*(folder.name for folder in folders(ROOT / "k8s")), "monitored"])
def test_nothing_is_wrong_with_what_we_ship(renders: dict[str, Render], overlay: str) -> None:
    assert [str(one) for one in found(renders[overlay])] == []


@pytest.mark.parametrize(
    ("check", "how"), [(check, how) for check, _, how in CASES], ids=[name for _, name, _ in CASES]
)
def test_one_fault_is_found_by_the_one_check_for_it(
    renders: dict[str, Render], check: str, how: dict[str, Any]
) -> None:
    results = found(broken(renders[how.get("overlay", "gpu")], how, PLACES))
    assert {one.check for one in results} == {check, *how.get("also", ())}, results
    assert any(how["says"] in str(one) for one in results), results


def test_every_check_has_mutations() -> None:
    assert set(NAMES) == set(MUTATIONS)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The manifests, to be broken before they are rendered."""
    for folder in ("k8s/base", "k8s/components", "k8s/overlays", "deploy/otel"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path / "k8s"


def test_a_kustomization_that_does_not_render_is_a_fault(copied: Path) -> None:
    (copied / "base" / "mlflow.yaml").unlink()
    fault = rendered(copied / "overlays" / "gpu", {})
    assert isinstance(fault, Fault)
    assert "mlflow.yaml" in fault.got


def test_names_that_kustomize_does_not_follow_are_found(copied: Path, renders: dict[str, Render]) -> None:
    kustomization = copied / "base" / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("configurations:", "# "))
    render = rendered(copied / "base", renders["base"].secrets)
    assert isinstance(render, Render)
    results = found(render)
    assert {one.check for one in results} >= {"references"}
    assert all(one.fault.got == "trackway-settings" for one in results if one.check == "references")
