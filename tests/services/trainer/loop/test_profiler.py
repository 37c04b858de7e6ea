"""The trace of a profiled update, and that it never fails a run."""

import gzip
import json
from pathlib import Path

import torch

from trackway.trainer.loop.base import Profiler


def test_a_step_that_is_chosen_has_a_trace_and_others_have_none(tmp_path: Path):
    profiler = Profiler(tmp_path / "profile", frozenset({2}))

    for step in (1, 2, 3):
        with profiler.step(step):
            torch.ones(8, 8).mm(torch.ones(8, 8))

    [trace] = (tmp_path / "profile").iterdir()
    assert trace.name == "step_2.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names


def test_a_trace_that_cannot_be_written_is_logged(tmp_path: Path, caplog):
    (tmp_path / "profile").write_text("a file")

    with Profiler(tmp_path / "profile", frozenset({1})).step(1):
        torch.ones(1)

    assert "the profile of step 1 cannot be written" in caplog.text
