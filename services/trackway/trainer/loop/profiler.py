"""PyTorch's profiler around the updates of some steps."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

logger = logging.getLogger("trackway.trainer")


@dataclass(frozen=True)
class Profiler:
    """Writes `step_<n>.json.gz` for Perfetto or chrome://tracing."""

    folder: Path
    steps: frozenset[int]

    @contextmanager
    def step(self, number: int) -> Iterator[None]:
        """Profile the block if it is one of the steps. A trace that cannot be written is logged, and fails nothing."""
        if number not in self.steps:
            yield
            return
        gpu = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as profiled:
            yield
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            profiled.export_chrome_trace(str(self.folder / f"step_{number}.json.gz"))
        except OSError as error:
            logger.warning("the profile of step %d cannot be written to %s: %s", number, self.folder, error)
