"""Who publishes when a run goes on while the last process's lock has not been let go yet."""

import threading
from pathlib import Path
from typing import cast

import pytest

from trackway.clients.weights import WeightStore
from trackway.trainer import publisher
from trackway.trainer.learner import Learner
from trackway.trainer.publisher import Publisher
from trackway.wire.errors import ErrorCode, TrackwayError


def open_publisher(store: Path, run: str) -> Publisher:
    return Publisher(WeightStore(str(store)), cast(Learner, None), run, "0123456789abcdef", store / "export", 2)


def test_a_run_waits_for_its_own_last_process_to_let_go(tmp_path: Path) -> None:
    last = open_publisher(tmp_path, "mine")
    waiting = threading.Thread(target=lambda: open_publisher(tmp_path, "mine").close())
    waiting.start()
    waiting.join(0.1)
    waited = waiting.is_alive()

    last.close()
    waiting.join(30)

    assert (waited, waiting.is_alive()) == (True, False)


def test_a_run_waits_neither_for_another_run_nor_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publisher, "CLAIM_WAIT_S", 0.0)
    holder = open_publisher(tmp_path, "mine")
    refused = []
    for run in ("other", "mine"):
        with pytest.raises(TrackwayError) as caught:
            open_publisher(tmp_path, run)
        refused.append(caught.value.code)
    holder.close()

    assert refused == [ErrorCode.CONFLICT] * 2
