"""What ranks send one another: values of a type, the errors of files, and what they refuse."""

import pickle
from collections.abc import Iterator

import pytest
import torch
from pydantic import TypeAdapter
from torch import distributed

from tests.services.trainer.rank_processes import RankProcesses, rank_processes
from trackway.learner.ranks.group import TEXT, receive_command
from trackway.learner.ranks.launch import RankError
from trackway.learner.ranks.messages import MOST_BYTES, broadcast, gather
from trackway.learner.ranks.sharding import Ranks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankProcesses]:
    with rank_processes(2) as processes:
        yield processes


def exchanged(ranks: Ranks) -> tuple[list[str], list[float]]:
    first = broadcast(TypeAdapter(list[str]), ["a", "ä"]) if ranks.is_first else broadcast(TypeAdapter(list[str]))
    return first, gather(TypeAdapter(float), 10.0**ranks.index / 3)


def test_ranks_get_equal_values_of_each(two_ranks: RankProcesses):
    assert two_ranks.run(exchanged) == [(["a", "ä"], [1 / 3, 10 / 3])] * 2


def of_a_missing_file(ranks: Ranks, error: OSError) -> tuple[object, ...]:
    def work() -> None:
        if not ranks.is_first:
            raise error

    with pytest.raises(type(error)) as raised:
        ranks.of_each(work, TypeAdapter(None))
    return type(raised.value), raised.value.errno, raised.value.strerror, raised.value.filename, str(raised.value)


@pytest.mark.parametrize(
    "error", [FileNotFoundError(2, "No such file", "/a/b"), OSError(28, "No space left"), OSError("cannot be read")]
)
def test_an_oserror_of_one_rank_is_raised_in_all(two_ranks: RankProcesses, error: OSError):
    expected = (type(error), error.errno, error.strerror, error.filename, str(error))

    assert two_ranks.run(of_a_missing_file, error) == [expected] * 2


def refusal(ranks: Ranks, name: str, sent: bytes, size: int | None = None) -> str:
    """The error of the second rank when the first one sends a command with these bytes as its arguments."""
    if not ranks.is_first:
        with pytest.raises((ValueError, RankError)) as raised:
            receive_command()
        return str(raised.value)
    broadcast(TEXT, name)
    if sent:
        distributed.broadcast(torch.tensor(size or len(sent)), src=0)
    if sent and not size:
        distributed.broadcast(torch.frombuffer(bytearray(sent), dtype=torch.uint8), src=0)
    return ""


def test_ranks_refuse_unknown_commands_and_other_arguments(two_ranks: RankProcesses):
    assert two_ranks.run(refusal, "__del__", b"")[1].startswith("expected a command among __init__, update, ")
    assert "expected value" in two_ranks.run(refusal, "save", pickle.dumps(["/tmp"]))[1]
    assert "Input should be a valid array" in two_ranks.run(refusal, "save", b'"/tmp"')[1]
    for size in (-1, MOST_BYTES + 1):
        assert f"of 1 to {MOST_BYTES} bytes" in two_ranks.run(refusal, "save", b"[]", size)[1]
