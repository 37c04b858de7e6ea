"""Secrets created by the user: those printed by `k8s/secrets.sh`, and those of the commands in its header."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from tests.k8s.checks.model import Object
from tests.k8s.checks.render import KUBECTL


def made_by(script: Path) -> dict[str, set[str]]:
    """Keys by name. Raises CalledProcessError if the script, or a command in its header, fails."""
    texts = [_output(["bash", str(script)]), *_commanded(script.read_text())]
    documents: list[Object] = [document for text in texts for document in yaml.safe_load_all(text) if document]
    found: dict[str, set[str]] = {}
    for secret in documents:
        keys = {*(secret.get("data") or {}), *(secret.get("stringData") or {})}
        found.setdefault(secret["metadata"]["name"], set()).update(keys)
    return found


def _commanded(script: str) -> Iterator[str]:
    """The Secrets of the `kubectl create secret` commands in the comments."""
    comments = "\n".join(re.findall(r"^#(.*)$", script, re.MULTILINE)).replace("\\\n", " ")
    for command in re.findall(r"\bkubectl (.*\bcreate secret .*)", comments):
        yield _output([str(KUBECTL), *shlex.split(command), "--dry-run=client", "--output=yaml"])


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
