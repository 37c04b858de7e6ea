"""How many CPU threads a model computes with."""

import os
from pathlib import Path

import pytest

from trackway.system.process import choose_threads, usable_cores

BOUND = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("parameters", "cores", "taken", "threads"),
    [
        (1_999_999, 8, 0, 1),
        (2_000_000, 8, 0, 8),
        (2_000_000, 8, 1, 7),
        (2_000_000, 2, 1, 1),
        (2_000_000, 1, 1, 1),
    ],
)
def test_a_large_model_takes_the_cores_that_others_leave(parameters: int, cores: int, taken: int, threads: int):
    assert choose_threads(parameters, cores, taken) == threads


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("max 100000", BOUND), (f"{(BOUND + 1) * 100000} 100000", BOUND), ("150000 100000", 1), ("50000 100000", 1)],
)
def test_a_containers_limit_counts_in_whole_cores(tmp_path: Path, quota: str, cores: int):
    file = tmp_path / "cpu.max"
    file.write_text(f"{quota}\n")
    assert usable_cores(file) == cores
    assert usable_cores(tmp_path / "none") == BOUND


def test_a_system_without_bound_processes_has_all_its_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delattr(os, "sched_getaffinity")
    assert usable_cores(tmp_path / "none") == os.cpu_count()
