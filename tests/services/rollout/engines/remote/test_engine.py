"""The parts that servers' engines share and that need no server."""

import asyncio
import json
from pathlib import Path

import pytest

from trackway.rollout.engines.admission import ModelFacts
from trackway.rollout.engines.remote.control import Calls, VersionNames
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams

FACTS = ModelFacts(vocab_size=10, max_positions=100, eos_token_ids=frozenset({2}))


def test_a_name_is_given_once_and_found_again() -> None:
    names = VersionNames()
    given = [names.new(version) for version in (0, 7, 6, 7, 8)]
    assert given == ["0", "7", "6+1", "7+2", "8"]
    assert [names.version(name) for name in [*given, "9", "default"]] == [0, 7, 6, 7, 8, None, None]


def test_old_names_are_forgotten() -> None:
    names = VersionNames()
    for version in range(1002):
        names.new(version)
    assert (names.version("1"), names.version("2")) == (None, 2)


def write(folder: Path, config: dict[str, object], generation: dict[str, object] | None = None) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def test_facts_are_read_from_the_top_or_from_the_text_config(tmp_path: Path) -> None:
    sizes: dict[str, object] = {"vocab_size": 9, "max_position_embeddings": 20, "eos_token_id": 1}
    want = ModelFacts(9, 20, frozenset({1}))
    assert ModelFacts.read(write(tmp_path, sizes)) == want
    assert ModelFacts.read(write(tmp_path, {"vocab_size": 5, "text_config": sizes})) == want


def test_stop_ids_of_the_generation_config_win(tmp_path: Path) -> None:
    sizes: dict[str, object] = {"vocab_size": 9, "max_position_embeddings": 20, "eos_token_id": 1}
    assert ModelFacts.read(write(tmp_path, sizes, {"eos_token_id": [3, 4]})).eos_token_ids == {3, 4}
    assert ModelFacts.read(write(tmp_path, sizes, {"temperature": 1})).eos_token_ids == {1}


@pytest.mark.parametrize("config", [None, "no json", '{"vocab_size": 9}'])
def test_a_folder_that_is_no_model_is_refused(tmp_path: Path, config: str | None) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(TrackwayError, match=f"expected a Hugging Face model folder, got {tmp_path}") as raised:
        ModelFacts.read(tmp_path)
    assert raised.value.code is ErrorCode.INVALID_REQUEST


@pytest.mark.anyio
async def test_those_turned_away_are_told_times_one_after_the_other() -> None:
    calls = Calls(RolloutSettings(max_num_seqs=1, max_queue=0), FACTS, 50)
    calls.admit([3], SamplingParams(), "r")
    times = []
    for _ in range(2):
        with pytest.raises(TrackwayError) as raised:
            calls.admit([3], SamplingParams(), "r")
        times.append(float(str(raised.value.detail["retry_after_s"])))
    assert times[0] == pytest.approx(5, abs=0.1)
    assert times[1] == pytest.approx(10, abs=0.1)


@pytest.mark.anyio
async def test_a_call_that_waits_ends_in_time_when_it_is_cut() -> None:
    call = Calls(RolloutSettings(), FACTS, 50).admit([3], SamplingParams(), "r")
    asyncio.get_running_loop().call_later(0.05, call.end_within, 0.05)
    with pytest.raises(TimeoutError):
        await call.within(asyncio.Event().wait)
    with pytest.raises(TimeoutError):
        await call.within(asyncio.Event().wait)
