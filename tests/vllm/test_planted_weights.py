"""Wrong weights in a real vLLM, between two versions that a learner really made, are told by name."""

import random
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from tests.services.rollout.planted_weights import DEMO, USUAL, Pairs, Versions, make_versions
from tests.vllm.vllm_runs import DEVICE, GREEDY, MARKS, PROMPT, VOCAB, CanBeMisled, Misled, settings_of, started
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Verdict, WeightProof

pytestmark = [*MARKS, pytest.mark.extended]


@pytest.fixture(scope="module")
def versions(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Versions]:
    """By the type of the run and its learning rate; made once."""
    made: dict[tuple[str, float], Versions] = {}

    def of(dtype: str, lr: float) -> Versions:
        if (dtype, lr) not in made:
            made[dtype, lr] = make_versions(base, pairs(), tmp_path_factory.mktemp("versions"), dtype, lr)
        return made[dtype, lr]

    return of


def pairs() -> Pairs:
    generator = random.Random(0)
    prompts = [[generator.randrange(VOCAB) for _ in range(12)] for _ in range(4)]
    return [(prompt, [generator.randrange(VOCAB) for _ in range(30)]) for prompt in prompts for _ in range(4)]


async def misled(engine: VllmEngine) -> AsyncIterator[Misled]:
    """An adapter of its own, attached to the same server."""
    own = engine.settings.model_copy(update={"engine_url": engine.http.base_url})
    async with started(Misled(own)) as misled_engine:
        yield misled_engine


@pytest.fixture
async def packed(engine: VllmEngine) -> AsyncIterator[Misled]:
    """In float32, with the CPU's packed weights."""
    async for misled_engine in misled(engine):
        yield misled_engine


@pytest.fixture(scope="module")
async def server(environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """In bfloat16, with the weights of all layers in memory as on a GPU."""
    settings = settings_of(base, tmp_path_factory.mktemp("whole") / "vllm.log", dtype="bfloat16")
    settings.engine_args.extend(["--worker-extension-cls", "tests.vllm.whole_weights.WholeWeights"])
    async with started(VllmEngine(settings)) as engine:
        yield engine


@pytest.fixture
async def whole(server: VllmEngine) -> AsyncIterator[Misled]:
    """Attached to it."""
    async for misled_engine in misled(server):
        yield misled_engine


@pytest.fixture(scope="module")
async def ranks(environment: Path, base: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmEngine]:
    """As `server`, with two ranks that each have half of the model."""
    log = tmp_path_factory.mktemp("ranks") / "vllm.log"
    settings = settings_of(base, log, dtype="bfloat16", tensor_parallel_size=2)
    settings.engine_args.extend(["--worker-extension-cls", "tests.vllm.whole_weights.WholeWeights"])
    async with started(VllmEngine(settings)) as engine:
        yield engine


@pytest.fixture
async def divided(ranks: VllmEngine) -> AsyncIterator[Misled]:
    """Attached to it."""
    async for misled_engine in misled(ranks):
        yield misled_engine


async def verdicts(engine: CanBeMisled, versions: Versions, proof: WeightProof | None = None) -> dict[str, Verdict]:
    """By fault: the verdict when the server is told to load version 2 and takes something else instead."""
    found: dict[str, Verdict] = {}
    number = engine.version
    for fault, folder in versions.folders.items():
        engine.instead = {}
        await engine.load_weights(versions.folders["old kept"], number := number + 1, versions.before)
        engine.instead = {versions.folders["right"]: folder}
        try:
            await engine.load_weights(versions.folders["right"], number := number + 1, proof or versions.proof)
        except TrackwayError as error:
            assert engine.version == number - 1
            found[fault] = Verdict(str(error.detail["verdict"]))
            stale = found[fault] is Verdict.STALE
            assert error.code is (ErrorCode.WEIGHTS_STALE if stale else ErrorCode.WEIGHTS_CORRUPT)
        else:
            assert engine.judgement is not None
            assert engine.judgement.verdict.accepted
            found[fault] = engine.judgement.verdict
    return found


@pytest.mark.parametrize("lr", [DEMO, USUAL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_digests_tell_every_fault_where_vllm_tells_those_of_all_tensors(
    whole: Misled, versions: Callable[..., Versions], dtype: str, lr: float
) -> None:
    made = versions(dtype, lr)

    assert await verdicts(whole, made) == {
        "right": Verdict.PROVEN,
        "old kept": Verdict.STALE,
        "one left out": Verdict.WRONG,
        "two swapped": Verdict.WRONG,
        "another run": Verdict.WRONG,
    }


async def test_digests_of_all_ranks_tell_every_fault(divided: Misled, versions: Callable[..., Versions]) -> None:
    assert await verdicts(divided, versions("bfloat16", USUAL)) == {
        "right": Verdict.PROVEN,
        "old kept": Verdict.STALE,
        "one left out": Verdict.WRONG,
        "two swapped": Verdict.WRONG,
        "another run": Verdict.WRONG,
    }


async def test_all_published_tensors_are_counted_and_refused_ones_are_named(
    whole: Misled, versions: Callable[..., Versions]
) -> None:
    made = versions("bfloat16", USUAL)
    await whole.load_weights(made.folders["right"], 1, made.proof)
    judgement = whole.judgement
    whole.instead = {made.folders["right"]: made.folders["one left out"]}
    await whole.load_weights(made.folders["old kept"], 2, made.before)

    with pytest.raises(TrackwayError, match=r"layers\.1\.self_attn\.q_proj\.weight.*: other than published"):
        await whole.load_weights(made.folders["right"], 3, made.proof)

    assert judgement is not None
    assert judgement.tensors == judgement.tensors_published == len(made.proof.digests)
    assert len((await whole.generate(PROMPT, GREEDY, "after")).token_ids) == 20


@pytest.mark.skipif(DEVICE == "cuda", reason="only vLLM's build for the CPU packs weights")
async def test_answers_tell_what_packed_weights_hide(packed: Misled, versions: Callable[..., Versions]) -> None:
    by_rate = {lr: await verdicts(packed, versions("float32", lr)) for lr in (DEMO, USUAL)}

    assert by_rate[DEMO] == {
        "right": Verdict.ROUNDED,
        "old kept": Verdict.STALE,
        "one left out": Verdict.WRONG,
        "two swapped": Verdict.WRONG,
        "another run": Verdict.WRONG,
    }
    assert {fault: verdict.accepted for fault, verdict in by_rate[USUAL].items()} == {
        "right": True,
        "old kept": False,
        "one left out": True,  # of nine tensors of a kind one, a thousandth of a thousandth: only its digest would tell
        "two swapped": False,
        "another run": False,
    }


async def test_without_digests_answers_that_do_not_change_are_old_ones_even_in_bfloat16(
    server: VllmEngine, versions: Callable[..., Versions]
) -> None:
    made = versions("bfloat16", USUAL)
    own = server.settings.model_copy(update={"engine_url": server.http.base_url, "weight_digests": False})
    async with started(Misled(own)) as engine:
        found = await verdicts(engine, made)

    assert (found["right"], found["old kept"]) == (Verdict.INDISTINGUISHABLE, Verdict.STALE)
    assert found["two swapped"] is Verdict.WRONG
