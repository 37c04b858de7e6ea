"""The commands of docs/guides/kubernetes, word by word, and how they run."""

import re
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGES = sorted((ROOT / "docs/guides/kubernetes").glob("*.md"))
OVERLAY = "tests/k8s/live/small"
_BLOCK = re.compile(r"^```console\n(.*?)^```", re.MULTILINE | re.DOTALL)
_INLINE = re.compile(r"`(kubectl [^`]+)`")


def documented() -> list[str]:
    """Every command of a console block and every kubectl command within a sentence, without the comments."""
    found: list[str] = []
    for page in PAGES:
        text = page.read_text()
        for block in _BLOCK.findall(text):
            found += [command.strip() for command in re.split(r"^\$ ", block, flags=re.MULTILINE) if command.strip()]
        found += [" ".join(command.split()) for command in _INLINE.findall(_BLOCK.sub("", text))]
    return list(dict.fromkeys(re.sub(" +# .*", "", words) for words in found))


def command(words: str) -> str:
    """The one documented command that begins so and, after a ` ... `, contains the rest."""
    start, _, rest = words.partition(" ... ")
    [found] = [command for command in documented() if command.startswith(start) and rest in command]
    return found


def script(*commands: str) -> str:
    """These commands in one shell, with the small overlay for the quick start's and for OVERLAY."""
    lines = "\n".join(map(command, commands))
    return re.sub(r"k8s/overlays/cpu-quickstart|\bOVERLAY\b", OVERLAY, lines)


def run(*commands: str, deadline_s: float = 600.0) -> str:
    """Run these documented commands in one shell; returns what they print."""
    return shell(script(*commands), deadline_s)


def shell(text: str, deadline_s: float = 600.0) -> str:
    """Run a script; returns what it prints, and fails the test with its errors."""
    ended = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text], cwd=ROOT, capture_output=True, text=True, timeout=deadline_s
    )
    assert ended.returncode == 0, f"{text}\n{ended.stdout[-2000:]}\n{ended.stderr[-2000:]}"
    return ended.stdout


@contextmanager
def forwarded(words: str, port: int, deadline_s: float = 60.0) -> Iterator[None]:
    """A documented `kubectl port-forward ... &` until the block ends."""
    process = subprocess.Popen(
        ["bash", "-c", f"exec {script(words).removesuffix('&')}"], cwd=ROOT, stdout=subprocess.DEVNULL
    )
    try:
        end = time.monotonic() + deadline_s
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 5).close()
                break
            except OSError:
                assert process.poll() is None and time.monotonic() < end, f"nothing answers after {words}"
                time.sleep(0.2)
        yield
    finally:
        process.terminate()
        process.wait(60)


def secret(name: str, key: str) -> str:
    """A value of a Secret."""
    return shell(f"kubectl -n trackway get secret {name} -o jsonpath='{{.data.{key}}}' | base64 -d")
