"""The Secrets that a user makes: those that `k8s/secrets.sh` prints, and those that its head tells one to create."""

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import yaml

from checks.model import Object
from checks.render import KUBECTL


def made_by(script: Path) -> dict[str, set[str]]:
    """Names and keys; CalledProcessError when the script, or a command that it names, fails."""
    texts = [_output(["bash", str(script)]), *_commanded(script.read_text())]
    documents: list[Object] = [one for text in texts for one in yaml.safe_load_all(text) if one]
    found: dict[str, set[str]] = {}
    for one in documents:
        keys = {*(one.get("data") or {}), *(one.get("stringData") or {})}
        found.setdefault(one["metadata"]["name"], set()).update(keys)
    return found


def _commanded(script: str) -> Iterator[str]:
    """What the `kubectl create secret` commands of the comments would make."""
    comments = "\n".join(re.findall(r"^#(.*)$", script, re.MULTILINE)).replace("\\\n", " ")
    for command in re.findall(r"\bkubectl (.*\bcreate secret .*)", comments):
        yield _output([str(KUBECTL), *shlex.split(command), "--dry-run=client", "--output=yaml"])


def _output(command: list[str]) -> str:
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stdout
