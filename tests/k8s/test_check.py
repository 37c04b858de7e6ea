"""The command of the checks: one line a fault, a sum, and an exit status."""

from pathlib import Path

import pytest

from tests.k8s import check
from tests.k8s.checks.run import NAMES

pytestmark = pytest.mark.manifests

CONFIG_MAP = """\
apiVersion: v1
kind: ConfigMap
metadata: { name: settings, namespace: default }
dta: { a: b }
"""


@pytest.fixture
def overlay(tmp_path: Path) -> Path:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "kustomization.yaml").write_text("resources: [settings.yaml]\n")
    (folder / "settings.yaml").write_text(CONFIG_MAP)
    return folder


def test_a_fault_is_a_line_and_an_exit_status(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check.main([str(overlay)]) == 1
    fault, total = capsys.readouterr().out.splitlines()
    assert fault == (
        "mine: ConfigMap/settings: (top): expected what its schema allows, "
        "got Additional properties are not allowed ('dta' was unexpected); correct the field [schemas]"
    )
    assert total.startswith(f"1 renders, 1 objects, {1 + len(NAMES)} checks: 1 faults (")


def test_what_kustomize_refuses_is_a_fault(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (overlay / "settings.yaml").unlink()
    assert check.main([str(overlay)]) == 1
    assert "mine: kustomization.yaml: " in capsys.readouterr().out


def test_without_a_fault_the_status_is_zero(overlay: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (overlay / "settings.yaml").write_text(CONFIG_MAP.replace("dta", "data").replace(", namespace: default", ""))
    assert check.main([str(overlay)]) == 0
    assert capsys.readouterr().out.startswith(f"1 renders, 1 objects, {1 + len(NAMES)} checks: 0 faults (")
