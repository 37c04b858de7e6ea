"""Start of a learner's ranks: on this machine, or on nodes that the deployment reaches.

A rank is a process in either case. A launcher starts it and knows its exit status.
"""

import importlib
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import psutil

from trackway.run_config.placement import Placement
from trackway.system import without_secrets

LAUNCHER = "TRACKWAY_RANK_LAUNCHER"
"""Environment variable: the launcher for several nodes as `module:class`, set by a deployment that has one."""
RANK_PROGRAM = "trackway.learner.ranks.process"
LOST = 256
"""In place of the exit status of a rank whose node no longer answers."""
INTERFACES = {"GLOO_SOCKET_IFNAME": "", "NCCL_SOCKET_IFNAME": "="}
"""Environment variables for the network interface of collectives, and what stands before a name that is no prefix."""
_OF_ALL_RANKS = re.compile(
    r"OMP_NUM_THREADS|TOKENIZERS_PARALLELISM|PYTORCH_(CUDA_)?ALLOC_CONF|(TORCH_)?NCCL_\w+|CUDA_\w+"
)
_OF_A_NODE = ("CUDA_VISIBLE_DEVICES", *INTERFACES)


def handed_over(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that ranks on other nodes take from the first rank, such as NCCL's.

    Ranks with different values of `NCCL_P2P_DISABLE` or `NCCL_IB_DISABLE` deadlock.
    """
    return {
        name: value
        for name, value in without_secrets(environment).items()
        if _OF_ALL_RANKS.fullmatch(name) and name not in _OF_A_NODE
    }


class RankError(RuntimeError):
    """A rank of the learner has died or does not answer. The group is of no further use."""


class RankProcess(Protocol):
    """The process of a rank. `subprocess.Popen` is one."""

    def poll(self) -> int | None:
        """Its exit status, negative for a signal, or LOST. None while it runs."""
        ...

    def wait(self, timeout: float) -> int:
        """The same, once it has ended. Raises TimeoutExpired."""
        ...

    def kill(self) -> None:
        """Ends it at once. Does nothing when it has ended."""
        ...


class RankLauncher(Protocol):
    """Starts ranks. Used by one thread at a time."""

    @property
    def hosts(self) -> Sequence[str]:
        """The address of each node; at the first one the ranks reach the first rank."""
        ...

    def start(self, rank: int, arguments: Sequence[str]) -> RankProcess:
        """Starts `python -m trackway.learner.ranks.process` with these arguments. Raises RankError."""
        ...

    def close(self) -> None:
        """Gives back the nodes, once the ranks have ended. Raises nothing."""
        ...


class LocalLauncher:
    """Processes of this machine."""

    hosts = ("127.0.0.1",)

    def start(self, rank: int, arguments: Sequence[str]) -> "subprocess.Popen[bytes]":
        """Implement `RankLauncher.start`."""
        return start_here(arguments)

    def close(self) -> None:
        """Implement `RankLauncher.close`. Nothing is held."""


def start_here(
    arguments: Sequence[str], paths: Sequence[str] = (), environment: Mapping[str, str] | None = None
) -> "subprocess.Popen[bytes]":
    """The process of a rank, which writes to this one's output, finds modules where this one does, and ends with it.

    It gets none of this process's secrets: ranks share GPU memory, so they cannot refuse inspection. `paths` are
    further folders of modules, `environment` further variables.
    """
    folders = dict.fromkeys(path for path in (*sys.path, *paths) if path)
    return subprocess.Popen(
        [sys.executable, "-m", RANK_PROGRAM, *arguments, str(os.getpid())],
        env={**without_secrets(os.environ), **(environment or {}), "PYTHONPATH": os.pathsep.join(folders)},
        stdin=subprocess.DEVNULL,
    )


def launcher_for(placement: Placement, *, with_gpus: bool, deadline_s: float) -> RankLauncher:
    """The launcher of a placement. Waits `deadline_s` for the nodes.

    Raises ValueError when there are too few of them, or when the deployment has no launcher for several.
    """
    if placement.nodes == 1:
        return LocalLauncher()
    name = os.environ.get(LAUNCHER)
    if not name:
        raise ValueError(
            f"trainer.nnodes: expected 1 where the trainer does not run on Ray, got {placement.nodes}; deploy the "
            "services on a Ray cluster, or set it to 1"
        )
    module, _, attribute = name.partition(":")
    make = getattr(importlib.import_module(module), attribute)
    return cast(RankLauncher, make(placement, with_gpus=with_gpus, deadline_s=deadline_s))


def use_interface_towards(host: str) -> None:
    """Have gloo and NCCL listen on the interface by which this machine reaches `host`.

    Variables that name another one are kept, unless one of both is the loopback interface: it reaches no other machine,
    and within one it is enough. Without a variable, gloo takes the address of this machine's own name, and NCCL any
    interface except the loopback.
    """
    family, kind, _, _, address = socket.getaddrinfo(host, 1, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    interfaces = {
        entry.address.partition("%")[0]: name for name, entries in psutil.net_if_addrs().items() for entry in entries
    }
    if own not in interfaces:
        return
    loopback = interfaces.get("127.0.0.1")
    for variable, exactly in INTERFACES.items():
        named = os.environ.get(variable, "").removeprefix(exactly)
        if named in ("", loopback) or interfaces[own] == loopback:
            os.environ[variable] = exactly + interfaces[own]
