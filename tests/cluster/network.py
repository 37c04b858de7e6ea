"""Hosts on one switch: network namespaces of this machine, with addresses that are kept for documentation.

Nothing is added to the machine's own network, so two of these do not meet. Needs root.
"""

import ctypes
import os
import re
import secrets
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_NAMESPACES = Path("/run/netns")
_libc = ctypes.CDLL(None, use_errno=True)


def unavailable() -> str | None:
    """Why there can be no such network here; None when there can."""
    probe = f"tw{secrets.token_hex(3)}"
    tried = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces need root and CAP_SYS_ADMIN: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", probe], check=True)
    return None


class Network:
    """A switch and its hosts, by name."""

    def __init__(self, *hosts: str) -> None:
        self._name = f"tw{os.getpid()}-{secrets.token_hex(3)}"
        self._hosts = hosts

    def address(self, host: str) -> str:
        """Of documentation's 192.0.2.0/24."""
        return f"192.0.2.{10 + self._hosts.index(host)}"

    def namespace(self, host: str) -> str:
        """The host's name among this machine's network namespaces."""
        return f"{self._name}-{host}"

    @contextmanager
    def connected(self) -> Iterator[None]:
        """The network as long as this lasts."""
        _remove_orphans()
        try:
            self._connect()
            yield
        finally:
            for host in ("switch", *self._hosts):
                subprocess.run(["ip", "netns", "del", self.namespace(host)], capture_output=True)

    def _connect(self) -> None:
        switch = self.namespace("switch")
        _ip(f"netns add {switch}")
        _ip(f"-n {switch} link add bridge type bridge")
        for host in self._hosts:
            own = self.namespace(host)
            _ip(f"netns add {own}")
            _ip(f"link add {host} netns {switch} type veth peer name eth0 netns {own}")
            _ip(f"-n {switch} link set {host} master bridge")
            _ip(f"-n {switch} link set {host} up")
            _ip(f"-n {own} addr add {self.address(host)}/24 dev eth0")
            _ip(f"-n {own} link set eth0 up")
            _ip(f"-n {own} link set lo up")
            _ip(f"-n {own} route add default dev eth0")
        _ip(f"-n {switch} link set bridge up")

    def cut(self, host: str) -> None:
        """Pull the host's cable: what is on its way is lost, and nobody is told."""
        _ip(f"-n {self.namespace('switch')} link set {host} down")

    def heal(self, host: str) -> None:
        """Put the cable back."""
        _ip(f"-n {self.namespace('switch')} link set {host} up")

    @contextmanager
    def inside(self, host: str) -> Iterator[None]:
        """This thread, and the threads and processes that it starts, are on that host."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        there = os.open(_NAMESPACES / self.namespace(host), os.O_RDONLY)
        try:
            _enter(there)
            yield
        finally:
            _enter(before)
            os.close(before)
            os.close(there)


def _remove_orphans() -> None:
    """Delete the networks of processes that were killed."""
    for place in _NAMESPACES.glob("tw*"):
        owner = re.match(r"tw(\d+)-", place.name)
        if owner and not Path("/proc", owner[1]).exists():
            _ip(f"netns del {place.name}")


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


def _ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True)
