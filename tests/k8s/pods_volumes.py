"""A pod's volumes as folders of this machine: podman of Debian 12 plays hostPath alone."""

import os
import shutil
import tempfile
from pathlib import Path

from tests.k8s.checks.model import Object

USER = 10001


class Volumes:
    """Folders that belong to the pods' user, as `fsGroup` makes them; gone after `remove`."""

    def __init__(self) -> None:
        self._disk = Path(tempfile.mkdtemp(prefix="trackway-pods-"))
        self._memory = Path(tempfile.mkdtemp(prefix="trackway-pods-", dir="/dev/shm"))
        for folder in (self._disk, self._memory):
            folder.chmod(0o755)

    def folder(self, pod: str, volume: Object, secrets: dict[str, dict[str, str]]) -> Object:
        """The volume as a hostPath; claims are shared between pods."""
        name = volume["name"]
        if claim := volume.get("persistentVolumeClaim"):
            path = self._disk / "claims" / claim["claimName"]
        elif volume.get("emptyDir", {}).get("medium") == "Memory":
            path = self._memory / pod / name
        else:
            path = self._disk / pod / name
        _make(path)
        if secret := volume.get("secret"):
            for item in secret["items"]:
                _write(path / item["path"], secrets[secret["secretName"]][item["key"]], secret["defaultMode"])
        return {"name": name, "hostPath": {"path": str(path), "type": "Directory"}}

    def claim(self, name: str) -> Path:
        """A persistent volume's folder."""
        return self._disk / "claims" / name

    def remove(self) -> None:
        """Delete all of them."""
        for folder in (self._disk, self._memory):
            shutil.rmtree(folder, ignore_errors=True)


def _make(path: Path) -> None:
    path.mkdir(parents=True, exist_ok=True)
    os.chown(path, USER, USER)


def _write(path: Path, content: str, mode: int) -> None:
    path.write_text(content)
    path.chmod(mode)
    os.chown(path, 0, USER)
