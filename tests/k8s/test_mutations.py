"""Break one thing in a render: the check whose subject it is finds it, and no other; what may be is no fault."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.breaking import broken
from tests.k8s.checks import schemas
from tests.k8s.checks.model import Fault, part
from tests.k8s.checks.render import Render, folders, rendered
from tests.k8s.checks.run import NAMES, found

pytestmark = pytest.mark.manifests

ROOT = Path(__file__).parents[2]
MUTATIONS: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("mutations.yaml").read_text())
PLACES: dict[str, str] = MUTATIONS.pop("places")
ALLOWED: dict[str, list[dict[str, Any]]] = MUTATIONS.pop("allowed")
CASES = [(check, name, how) for check, cases in MUTATIONS.items() for name, how in cases.items()]


@pytest.mark.parametrize("overlay", [*(folder.name for folder in folders(ROOT / "k8s")), "extended"])
def test_nothing_is_wrong_with_what_we_ship(renders: dict[str, Render], overlay: str) -> None:
    assert [str(result) for result in found(renders[overlay])] == []


def test_the_releases_between_the_oldest_and_the_newest_take_what_we_ship(
    renders: dict[str, Render], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(schemas, "KUBERNETES", [f"1.{minor}" for minor in range(28, 36)])
    assert [str(fault) for render in renders.values() for fault in schemas.faults(render)] == []


@pytest.mark.parametrize(
    ("check", "how"), [(check, how) for check, _, how in CASES], ids=[name for _, name, _ in CASES]
)
def test_one_fault_is_found_by_the_one_check_for_it(
    renders: dict[str, Render], check: str, how: dict[str, Any]
) -> None:
    results = found(broken(renders[how.get("overlay", "gpu")], how, PLACES))
    assert {result.check for result in results} == {check, *how.get("also", ())}, results
    assert any(how["says"] in str(result) for result in results), results


@pytest.mark.parametrize("steps", ALLOWED.values(), ids=ALLOWED)
def test_a_change_that_may_be_is_no_fault(renders: dict[str, Render], steps: list[dict[str, Any]]) -> None:
    render = renders[steps[0].get("overlay", "gpu")]
    for how in steps:
        render = broken(render, how, PLACES)
    assert [str(result) for result in found(render)] == []


def test_the_reward_model_of_the_guide_fits_beside_the_five_services(renders: dict[str, Render]) -> None:
    guide = (ROOT / "docs/guides/kubernetes/install.md").read_text().partition("## A reward model")[2]
    reward, model = yaml.safe_load(guide.partition("```yaml\n")[2].partition("```")[0])["applications"]
    steps = [
        {"serve": "applications reward args", "to": reward["args"]},
        {"serve": "applications", "add": "", "entry": model},
    ]
    render = renders["gpu"]
    for how in steps:
        render = broken(render, how, PLACES)
    misspelt = broken(render, {"serve": "applications reward_model args engine", "rename": "", "to": "engin"}, PLACES)

    assert [str(result) for result in found(render)] == []
    assert {result.check for result in found(misspelt)} == {"applications"}


def test_every_check_has_mutations() -> None:
    assert set(NAMES) == set(MUTATIONS)


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """The manifests, to be broken before they are rendered."""
    for folder in ("k8s", "deploy/otel", "tests/k8s/extended"):
        shutil.copytree(ROOT / folder, tmp_path / folder)
    return tmp_path / "k8s"


def test_a_kustomization_that_does_not_render_is_a_fault(copied: Path) -> None:
    (copied / "base" / "mlflow.yaml").unlink()
    fault = rendered(copied / "overlays" / "gpu", {})
    assert isinstance(fault, Fault)
    assert "mlflow.yaml" in fault.got


def test_the_overlay_of_the_guide_for_the_python_tool_fits(copied: Path, renders: dict[str, Render]) -> None:
    guide = (ROOT / "docs/guides/python-tool.md").read_text().partition("### In a Kubernetes pod")[2]
    (copied / "overlays" / "python").mkdir()
    (copied / "overlays" / "python" / "kustomization.yaml").write_text(
        guide.partition("```yaml\n")[2].partition("```")[0]
    )
    render = rendered(copied / "overlays" / "python", renders["base"].secrets)
    assert isinstance(render, Render)
    assert [str(result) for result in found(render)] == []
    pod = part(render.find("Deployment", "trackway-tools-alone"), "spec.template.spec")
    [tools] = pod["containers"]
    assert (pod["hostUsers"], tools["securityContext"]["procMount"]) == (False, "Unmasked")
    assert pod["securityContext"]["seccompProfile"]["type"] == "Localhost"


def test_names_that_kustomize_does_not_follow_are_found(copied: Path, renders: dict[str, Render]) -> None:
    kustomization = copied / "base" / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("configurations:", "# "))
    render = rendered(copied / "base", renders["base"].secrets)
    assert isinstance(render, Render)
    results = found(render)
    assert {result.check for result in results} >= {"references"}
    assert all(result.fault.got == "trackway-settings" for result in results if result.check == "references")


def test_another_namespace_is_named_wherever_the_cluster_is_told_it(copied: Path, renders: dict[str, Render]) -> None:
    kustomization = copied.parent / "tests" / "k8s" / "extended" / "kustomization.yaml"
    kustomization.write_text(kustomization.read_text().replace("namespace: trackway", "namespace: other"))
    render = rendered(kustomization.parent, renders["base"].secrets)
    assert isinstance(render, Render)
    results = found(render)
    assert {result.check for result in results} == {"monitoring"}
    assert {result.fault.got for result in results} == {
        "trackway-serve-svc.trackway.svc:8000",
        "trackway-otel-collector.trackway.svc:8888",
    }
    assert all(".other.svc, which the Service is called" in result.fault.expected for result in results)
