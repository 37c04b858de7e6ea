"""Runs inside vLLM as its scheduler: a test slows its steps down and reads how far they are, on any machine.

Both go through the folder that the server's `--additional-config` names. While it holds `slow`, each step takes longer
than the one before: the first few cost a test nothing, and 300 take minutes. Its `tally.json` has the tokens of each
request that runs, and how many requests wait; it is written after each slow step, else when a request comes or goes.
"""

import json
import time
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # pyright: ignore[reportMissingImports]
from vllm.v1.core.sched.scheduler import Scheduler  # pyright: ignore[reportMissingImports]

LONGER_S = 0.01


class SlowScheduler(Scheduler if current_platform.is_cpu() else AsyncScheduler):
    """vLLM's own for this device, but for the time that a step takes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._folder = Path(self.vllm_config.additional_config["steps"])
        self._folder.mkdir()
        self._slow_steps = 0
        self._told: tuple[int, int] | None = None
        self._tell()

    def add_request(self, *args: Any) -> None:
        super().add_request(*args)
        self._tell()

    def schedule(self, *args: Any) -> Any:
        self._slow_steps = self._slow_steps + 1 if self._slow() else 0
        time.sleep(self._slow_steps * LONGER_S)
        return super().schedule(*args)

    def update_from_output(self, *args: Any) -> Any:
        made = super().update_from_output(*args)
        self._tell()
        return made

    def finish_requests(self, *args: Any) -> Any:
        finished = super().finish_requests(*args)
        self._tell()
        return finished

    def _slow(self) -> bool:
        return (self._folder / "slow").exists()

    def _tell(self) -> None:
        counts = self.get_request_counts()
        if counts == self._told and not self._slow():
            return
        new = self._folder / "tally.new"
        new.write_text(
            json.dumps({"running": [request.num_output_tokens for request in self.running], "waiting": counts[1]})
        )
        new.replace(self._folder / "tally.json")
        self._told = counts
