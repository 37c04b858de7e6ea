"""The Secrets that the references may name are read from the script that makes them."""

import subprocess
from pathlib import Path

import pytest

from tests.k8s.checks.secrets import made_by

pytestmark = pytest.mark.manifests


def script(folder: Path, text: str) -> Path:
    file = folder / "secrets.sh"
    file.write_text(f"#!/usr/bin/env bash\n{text}")
    return file


def test_what_it_prints_and_what_its_comments_say_to_create(tmp_path: Path) -> None:
    text = """# By hand:
#     kubectl --namespace n create secret generic by-hand \\
#         --from-literal=key=... --from-literal=other=...
printf -- '---\\nkind: Secret\\nmetadata: {name: printed}\\nstringData: {a: b}\\n'
printf -- '---\\nkind: Secret\\nmetadata: {name: printed}\\ndata: {c: ZA==}\\n'
"""
    assert made_by(script(tmp_path, text)) == {"printed": {"a", "c"}, "by-hand": {"key", "other"}}


@pytest.mark.parametrize(
    "text", ["exit 3\n", "# kubectl create secret generic a --from-litral=a=b\n"], ids=["a script", "a command"]
)
def test_one_that_fails_is_an_error(tmp_path: Path, text: str) -> None:
    with pytest.raises(subprocess.CalledProcessError):
        made_by(script(tmp_path, text))
