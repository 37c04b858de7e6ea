"""Launchers of ranks, and the network interface that they use."""

import os
import socket

import psutil
import pytest

from trackway.learner.ranks.launch import (
    INTERFACES,
    LAUNCHER,
    LocalLauncher,
    handed_over,
    launcher_for,
    use_interface_towards,
)
from trackway.run_config.placement import Placement


class Nodes:
    """A deployment's launcher."""

    def __init__(self, placement: Placement, *, with_gpus: bool, deadline_s: float) -> None:
        self.given = (placement, with_gpus, deadline_s)


def test_several_nodes_take_the_launcher_of_the_deployment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(LAUNCHER, f"{__name__}:Nodes")

    nodes = launcher_for(Placement(4, 2), with_gpus=True, deadline_s=5.0)

    assert vars(nodes) == {"given": (Placement(4, 2), True, 5.0)}
    assert isinstance(launcher_for(Placement(4), with_gpus=True, deadline_s=5.0), LocalLauncher)


def test_several_nodes_without_ray_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(LAUNCHER, raising=False)

    with pytest.raises(
        ValueError, match=r"^trainer\.nnodes: expected 1 where the trainer does not run on Ray, got 2; "
    ):
        launcher_for(Placement(4, 2), with_gpus=False, deadline_s=5.0)


def test_collectives_use_the_interface_towards_the_first_rank_unless_one_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ipv4 = {
        entry.address: name
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if entry.family == socket.AF_INET
    }
    loopback = ipv4.pop("127.0.0.1")

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "own")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "removed")
    monkeypatch.delenv("NCCL_SOCKET_IFNAME")
    for address, interface in ipv4.items():
        monkeypatch.delenv("NCCL_SOCKET_IFNAME", raising=False)
        use_interface_towards(address)
        assert [os.environ[variable] for variable in INTERFACES] == ["own", f"={interface}"]
    use_interface_towards("127.0.0.1")
    assert [os.environ[variable] for variable in INTERFACES] == [loopback, f"={loopback}"]
    for address, interface in ipv4.items():
        use_interface_towards("127.0.0.1")
        use_interface_towards(address)
        assert [os.environ[variable] for variable in INTERFACES] == [interface, f"={interface}"]


def test_ranks_on_other_nodes_get_what_all_must_have_alike_and_nothing_of_a_node_or_secret() -> None:
    alike = {
        "OMP_NUM_THREADS": "4",
        "TOKENIZERS_PARALLELISM": "false",
        "NCCL_IB_DISABLE": "1",
        "NCCL_P2P_DISABLE": "1",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "max_split_size_mb:64",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
    }
    others = {
        "CUDA_VISIBLE_DEVICES": "3",
        "NCCL_SOCKET_IFNAME": "eth1",
        "GLOO_SOCKET_IFNAME": "eth1",
        "TRACKWAY_TOKEN": "secret",
        "WANDB_API_KEY": "secret",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "HF_TOKEN": "secret",
        "PATH": "/bin",
        "MY_NCCL_DEBUG": "INFO",
    }

    assert handed_over(alike | others) == alike
