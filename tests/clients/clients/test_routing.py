"""Which replica a trajectory gets: its group's, an even share, its own again, and another one only where that pays."""

import pytest

from trackway.clients import direct
from trackway.clients.direct import TrajectoryRouting

AB, ABC = ["a", "b"], ["a", "b", "c"]
PROMPT = 1000


def started(routing: TrajectoryRouting, names: str, replicas: list[str], prompt: int = PROMPT) -> list[str]:
    """The replicas of first turns, each of a group of its own."""
    return [routing.place(name, f"group of {name}", prompt, replicas) for name in names]


def test_groups_are_spread_evenly_and_ties_go_to_the_first_replica() -> None:
    assert started(TrajectoryRouting(), "123456", ABC) == ["a", "b", "c", "a", "b", "c"]


def test_a_group_starts_where_its_prompt_is() -> None:
    chosen = TrajectoryRouting()
    assert [chosen.place(f"{group}/{n}", group, PROMPT, AB) for group in "xy" for n in range(4)] == ["a"] * 4 + [
        "b"
    ] * 4


def test_a_group_whose_later_turns_came_first_shares_its_shortest_prompt() -> None:
    chosen = TrajectoryRouting()
    for name, length in {"1": 5000, "2": 5000, "3": 25}.items():
        chosen.place(name, "group", length, ["a"])
    assert chosen.place("4", "group", 1000, AB) == "b"  # a saves 25 tokens, which are worth one trajectory of its three


def test_a_group_is_split_where_balance_is_worth_its_prompt() -> None:
    chosen = TrajectoryRouting()
    found = [chosen.place(str(n), "group", 100, AB) for n in range(8)]  # 100 tokens: worth four trajectories
    assert found == ["a"] * 5 + ["b"] * 3


def test_a_new_trajectory_is_worth_25_prompt_tokens() -> None:
    chosen = TrajectoryRouting()
    for number in range(4):
        chosen.place(str(number), "group", 100, ["a"])
    assert chosen.place("fifth", "group", 100, ["b", "a"]) == "b"


def test_a_move_is_worth_375_prompt_tokens() -> None:
    chosen = TrajectoryRouting()
    for number in range(4):
        chosen.place(str(number), "group", 10, ["a"])
    assert [chosen.place("0", "group", 3 * 375 + extra, ["b", "a"]) for extra in (1, 0)] == ["a", "b"]


def test_a_trajectory_stays_as_its_prompt_grows() -> None:
    chosen = TrajectoryRouting()
    chosen.place("other", "x", PROMPT, AB)
    turns = [chosen.place("own", "y", length, order) for length in (1000, 5000, 9000) for order in (AB, AB[::-1])]
    assert (turns, chosen.moved) == (["b"] * 6, 0)


def test_a_trajectory_that_ended_counts_no_more() -> None:
    chosen = TrajectoryRouting()
    assert started(chosen, "123", AB) == ["a", "b", "a"]
    chosen.release("1")
    chosen.release("3")
    chosen.release("3")
    chosen.release("unknown")
    assert started(chosen, "45", AB) == ["a", "a"]


@pytest.mark.parametrize(("length", "moved"), [(375, 8), (3750, 4), (37_500, 0)])
def test_a_new_replica_gets_what_a_move_pays_for(length: int, moved: int) -> None:
    """20 trajectories. Computing the prompt again costs 1, 10 or 100 trajectories."""
    chosen, names = TrajectoryRouting(), [str(n) for n in range(20)]
    for name in names:
        chosen.place(name, "group", 10, ["a"])
    for _ in range(3):
        assert [chosen.place(name, "group", 10 + length, AB) for name in names].count("b") == moved


def test_a_new_replica_gets_new_groups_until_it_has_as_many() -> None:
    chosen = TrajectoryRouting()
    started(chosen, "123456", AB)
    assert started(chosen, "789abc", ABC) == ["c", "c", "c", "a", "b", "c"]


def test_trajectories_of_a_lost_replica_are_shared_by_the_others() -> None:
    chosen, names = TrajectoryRouting(), "123456789"
    before = dict(zip(names, started(chosen, names, ABC), strict=True))
    after = {name: chosen.place(name, f"group of {name}", 5000, ["a", "c"]) for name in names}
    assert {name: after[name] for name in names if before[name] != "b"} == {
        name: before[name] for name in names if before[name] != "b"
    }
    assert sorted(after[name] for name in names if before[name] == "b") in (["a", "a", "c"], ["a", "c", "c"])
    assert chosen.moved == 3


def test_a_lost_replicas_prompt_is_not_looked_for() -> None:
    chosen = TrajectoryRouting()
    chosen.place("1", "group", PROMPT, ["b"])
    assert chosen.place("2", "group", PROMPT, ["a", "c"]) == "a"


def test_memory_is_bounded_and_what_is_forgotten_counts_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (direct.MAX_TRAJECTORIES, direct.MAX_GROUPS) == (65_536, 4096)
    monkeypatch.setattr(direct, "MAX_TRAJECTORIES", 2)
    monkeypatch.setattr(direct, "MAX_GROUPS", 2)
    chosen = TrajectoryRouting()
    assert started(chosen, "1234", AB) == ["a", "b", "a", "a"]
    assert (len(chosen._replicas), len(chosen._groups), chosen._trajectories) == (2, 2, {"a": 2})
    assert chosen.place("5", "group of 1", PROMPT, ["b", "a"]) == "b"  # the group's replica is forgotten
