"""A run whose GPU has too little memory."""

from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from trackway.learner.gpu_memory import ADVICE
from trackway.run_config import compose
from trackway.trainer import worker
from trackway.trainer.loop.from_config import advise
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.service_urls import ServiceUrls


@pytest.mark.parametrize(
    ("error", "notes"), [(torch.OutOfMemoryError("CUDA out of memory"), 2), (torch.AcceleratorError("CUDA error"), 0)]
)
def test_the_log_of_a_run_without_memory_ends_with_the_keys_that_help_and_the_forecast(
    tmp_path: Path,
    tiny_model: Path,
    urls: ServiceUrls,
    monkeypatch: pytest.MonkeyPatch,
    error: Exception,
    notes: int,
):
    folder = RunFolder(tmp_path / "run")
    folder.create(compose([f"actor_rollout_ref.model.path={tiny_model}"]), urls)
    monkeypatch.setattr(worker, "_heavy_imports", lambda: ({False: Mock(side_effect=error)}, Mock(), Mock(), advise))

    with pytest.raises(type(error)) as raised:
        worker.main([str(folder.path)])

    said = getattr(raised.value, "__notes__", [])
    assert len(said) == notes
    assert said[:1] == [ADVICE][:notes]
    assert all(line.startswith("Forecast for each GPU of the learner: ") for line in said[1:])
