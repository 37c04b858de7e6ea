"""The engine model of routing questions: its arithmetic by exact times, its blocks, and the same run for a seed."""

import math
import random

import pytest
from benchmarks.kv_engine import Call, Engine, Hardware, Work, run_offline
from benchmarks.routing import Case, Run

COSTS = Work(steps=1.0, decoded=0.5, prefilled=0.25)


def engine(blocks: int = 100, seqs: int = 8, budget: int = 64, block: int = 4, costs: Work = COSTS) -> Engine:
    return Engine(Hardware(costs, blocks, seqs, budget, block))


def endings(engine: Engine) -> list[tuple[float, object]]:
    """(time, trajectory) of each call's end."""
    found: list[tuple[float, object]] = []
    while engine.next_at < math.inf:
        ended = engine.step()
        found += [(round(engine.now, 9), call.trajectory) for call in ended]
    return found


def call(name: str, prompt: int, output: int, group: str = "", shared: int = 0) -> Call:
    return Call(name, group or name, shared, prompt, output)


def test_a_lone_call_takes_its_prompts_step_and_one_for_each_further_token() -> None:
    alone = engine()
    alone.add(call("a", 8, 5), 10.0)
    assert endings(alone) == [(10.0 + 1.0 + 8 * 0.25 + 4 * 1.5, "a")]
    assert alone.work == Work(steps=5, decoded=4, read=9 + 10 + 11 + 12, prefilled=8, attended=36)


def test_a_call_joins_the_batch_after_the_step_in_which_it_came() -> None:
    shared = engine()
    shared.add(call("a", 4, 11), 0.0)
    shared.step()  # the prompt, until 2.0
    shared.add(call("b", 4, 2), 4.0)  # a's second step ends at 5.0
    # b's prompt with a's step until 7.5, both until 9.5, a alone for its last six.
    assert endings(shared) == [(9.5, "b"), (18.5, "a")]


def test_a_prompt_is_computed_in_parts_of_the_budget_beside_decoding() -> None:
    busy = engine(budget=5)
    busy.add(call("a", 4, 30), 0.0)
    busy.step()
    busy.add(call("b", 10, 1), 2.0)
    ended = busy.step()
    assert (ended, busy.now) == ([], 2.0 + 1.5)  # the step in progress
    parts = [(busy.step(), busy.now)[1] for _ in range(3)]
    assert parts == [3.5 + 2.5, 6.0 + 2.5, 8.5 + 2.0]  # 4, 4 and 2 tokens


def test_a_turn_finds_the_full_blocks_of_the_turn_before_and_of_its_group() -> None:
    warm = engine()
    run_offline(warm, [call("a", 10, 3, "g", 6)])
    assert warm.cached(call("a", 20, 1, "g", 6)) == 12  # 12 of its 13 tokens are computed: three blocks
    assert warm.cached(call("b", 20, 1, "g", 6)) == 4  # a whole block of the group's six tokens
    assert warm.cached(call("b", 4, 1, "g", 4)) == 3  # one is left to compute
    run_offline(warm, [call("a", 20, 1, "g", 6), call("b", 8, 1, "g", 6)])
    assert (warm.reused, warm.free) == (12 + 4, 100)


def test_the_least_recently_used_blocks_are_evicted_from_the_end() -> None:
    small = engine(blocks=8)
    run_offline(small, [call("a", 16, 1)])
    run_offline(small, [call("b", 16, 1)])
    assert [small.cached(call(name, 100, 1)) for name in "ab"] == [16, 16]
    run_offline(small, [call("c", 4, 1)])
    assert [small.cached(call(name, 100, 1)) for name in "abc"] == [12, 16, 4]
    run_offline(small, [call("a", 12, 1)])  # used again
    run_offline(small, [call("d", 16, 1)])
    assert [small.cached(call(name, 100, 1)) for name in "abcd"] == [12, 0, 4, 16]


def test_without_a_free_block_the_latest_call_waits_and_is_computed_again() -> None:
    full = engine(blocks=6, costs=Work(steps=1.0))
    for name in "ab":
        full.add(call(name, 8, 10), 0.0)
    # Each takes two blocks and then a third. a needs a fourth in its sixth step, and b, with four tokens, goes. When a
    # has ended, b's next step computes its 12 tokens again and makes the fifth.
    assert endings(full) == [(10.0, "a"), (16.0, "b")]
    assert (full.preempted, full.free) == (1, 6)


def test_a_prompt_beyond_the_cache_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected a KV cache that holds a prompt of 100 tokens"):
        engine(blocks=8).add(call("a", 100, 1), 0.0)


def test_steps_taken_together_end_calls_when_single_steps_do(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> tuple[list[tuple[float, object]], int, int]:
        draw, replica = random.Random(3), engine(blocks=60, seqs=6, budget=16, costs=Work(1.0, 0.1, 0.01, 0.05, 0.001))
        found: list[tuple[float, object]] = []
        now, lengths = 0.0, dict.fromkeys("abcdefghij", 12)
        for _ in range(200):
            name = draw.choice("abcdefghij")
            now += draw.expovariate(0.15)
            while replica.next_at <= now:
                ended = replica.step()
                found += [(round(replica.now, 6), call.trajectory) for call in ended]
            output = draw.randint(1, 30)
            replica.add(call(name, lengths[name], output, name[0] + "g", 8), now)
            lengths[name] = 12 if lengths[name] > 60 else lengths[name] + output + 3
        return found + endings(replica), replica.preempted, replica.free

    together = run()
    affordable = Engine._affordable
    monkeypatch.setattr(Engine, "_affordable", lambda self, steps: min(1, affordable(self, steps)))
    assert run() == together
    assert (together[1] > 0, together[2], len(together[0])) == (True, 60, 200)


def test_a_simulated_run_is_the_same_for_the_same_seed() -> None:
    case = Case("cpu", replicas=2, turns=8, load=1.0, clients=2, added=1)
    first, again, other = (Run(case, "trajectory", seed).outcome() for seed in (1, 1, 2))
    assert first == again != other
    assert 0 < first.cached < 1 and first.stayed > 0.9
