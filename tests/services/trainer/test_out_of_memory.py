"""A run whose GPU has too little memory."""

import traceback
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from trackway.trainer import worker
from trackway.trainer.out_of_memory import ADVICE


def test_the_log_of_a_run_without_memory_ends_with_the_keys_that_help(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(worker, "_work", Mock())
    monkeypatch.setattr(worker, "run", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory")))

    with pytest.raises(torch.OutOfMemoryError) as raised:
        worker.main([str(tmp_path)])

    assert traceback.format_exception(raised.value)[-1] == f"{ADVICE}\n"
