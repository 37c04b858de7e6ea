"""The exit of a rank's process: after an error of its own GPU, and after one of a collective."""

import os
from unittest.mock import Mock

import pytest
import torch
from torch.distributed import DistBackendError

from tests.services.trainer.learner_settings import learner_config
from trackway.learner.gpu_memory import ADVICE
from trackway.learner.ranks import process
from trackway.learner.ranks.group import EXIT_PEER_LOST, GroupSettings
from trackway.run_config.placement import Placement


@pytest.fixture
def fails(monkeypatch: pytest.MonkeyPatch):
    """`fails(error)`: the exit status of a rank that serves until this error."""
    settings = GroupSettings(learner_config("/no/model"), Placement(2), 1.0)
    for module, name in ((process.ctypes, "CDLL"), (process.signal, "signal")):
        monkeypatch.setattr(module, name, Mock())
    monkeypatch.setattr(process, "SETTINGS", Mock(validate_json=Mock(return_value=settings)))
    monkeypatch.setattr(process.sys, "argv", ["process", "1", "127.0.0.1", "9", "{}", str(os.getppid())])

    def fail(error: Exception) -> int:
        monkeypatch.setattr(process, "serve", Mock(side_effect=error))
        return process.main()

    return fail


GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:31007"


@pytest.mark.parametrize("error", [DistBackendError("NCCL error: remote process exited"), RuntimeError(GLOO)])
def test_a_lost_peer_has_an_exit_status_of_its_own(fails, error: Exception):
    assert fails(error) == EXIT_PEER_LOST


@pytest.mark.parametrize(
    ("error", "notes"),
    [
        (torch.AcceleratorError("CUDA error: an illegal memory access was encountered"), []),
        (torch.OutOfMemoryError("CUDA out of memory"), [ADVICE]),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), []),
    ],
)
def test_an_error_of_its_own_is_raised_and_not_taken_for_a_lost_peer(fails, error: Exception, notes: list[str]):
    with pytest.raises(type(error)) as raised:
        fails(error)

    assert getattr(raised.value, "__notes__", []) == notes
