"""Wrong weights in the embedded engine, between two versions that the demo's learner really made, are told by name.

Digests find each of them in both types and at any learning rate. What the answers alone find is in the table below:
it is what an engine has that cannot tell digests.
"""

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from benchmarks.sim_engine import SimEngine
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.services.rollout.engine_runs import started, watching
from tests.services.rollout.engines.remote.sglang import sglang_fake
from tests.services.rollout.engines.remote.sglang.sglang_fake import Fake
from tests.services.rollout.planted_weights import (
    DEMO,
    LEFT_OUT,
    USUAL,
    Tensors,
    Versions,
    make_versions,
    planted,
    swap,
)
from trackway.clients.weights import WeightStore, WholeWeights
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.engines.remote.sglang import SglangEngine
from trackway.rollout.engines.torch import engine as torch_engine
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.system import free_port
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.weights import Verdict, WeightProof

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

TOO_SMALL = 1e-300
"""A learning rate that is 0 in float32: a step changes no weight."""
QUESTIONS = [f"Tom had {12 + n} pens and lost {5 + n} of them. How many pens does Tom still have?" for n in range(4)]


def sampled() -> list[tuple[list[int], list[int]]]:
    """Prompts and the demo model's own continuations of them."""
    tokenizer = AutoTokenizer.from_pretrained(TINY_MODEL)
    model = AutoModelForCausalLM.from_pretrained(TINY_MODEL, dtype=torch.float32).eval()
    torch.manual_seed(0)
    pairs = []
    for question in QUESTIONS:
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.encode(str(tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)))
        prompts = torch.tensor([ids] * 4)
        made = model.generate(prompts, do_sample=True, max_new_tokens=24, pad_token_id=0)  # pyright: ignore[reportAttributeAccessIssue]
        pairs += [(ids, continuation) for continuation in made[:, len(ids) :].tolist()]
    return pairs


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, float], Versions]:
    """By the type of the run and its learning rate; made once."""
    made: dict[tuple[str, float], Versions] = {}
    pairs = sampled()

    def of(dtype: str, lr: float) -> Versions:
        if (dtype, lr) not in made:
            made[dtype, lr] = make_versions(TINY_MODEL, pairs, tmp_path_factory.mktemp("versions"), dtype, lr)
        return made[dtype, lr]

    return of


@pytest.fixture(params=["float32", "bfloat16"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[TorchEngine]:
    """The embedded engine in either type."""
    engine = TorchEngine(RolloutSettings(model_path=TINY_MODEL, device="cpu", dtype=request.param, max_num_seqs=2))
    await engine.start()
    yield engine
    await engine.stop()


async def judged(
    engine: TorchEngine, versions: Versions, fault: str, proof: WeightProof, patch: pytest.MonkeyPatch
) -> Verdict:
    """The verdict when the engine is told to load version 2 and takes something else instead."""
    await engine.load_weights(versions.folders["old kept"], 1, versions.before)
    load = torch_engine.load
    with patch.context() as planting:
        planting.setattr(torch_engine, "load", lambda decoder, folder: load(decoder, versions.folders[fault]))
        try:
            await engine.load_weights(versions.folders["right"], 2, proof)
        except TrackwayError as error:
            assert engine.version == 1
            stale = error.detail["verdict"] == "stale"
            assert error.code is (ErrorCode.WEIGHTS_STALE if stale else ErrorCode.WEIGHTS_CORRUPT)
            assert ("still has version 1 or an older one" in error.message) is stale
            return Verdict(str(error.detail["verdict"]))
    assert engine.version == 2
    assert engine.judgement is not None
    assert engine.judgement.verdict.accepted
    return engine.judgement.verdict


@pytest.mark.parametrize("lr", [DEMO, USUAL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_digests_tell_every_fault_in_every_type_at_every_learning_rate(
    engine: TorchEngine, versions: Callable[..., Versions], dtype: str, lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = versions(dtype, lr)

    verdicts = {fault: await judged(engine, made, fault, made.proof, monkeypatch) for fault in made.folders}

    assert verdicts == {
        "right": Verdict.PROVEN,
        "old kept": Verdict.STALE,
        "one left out": Verdict.WRONG,
        "two swapped": Verdict.WRONG,
        "another run": Verdict.WRONG,
    }


NEW, OLD, OTHER, UNKNOWN = Verdict.ROUNDED, Verdict.STALE, Verdict.WRONG, Verdict.INDISTINGUISHABLE
BY_ANSWERS = {
    # right, old kept, one left out, two swapped, another run
    (DEMO, "float32"): (NEW, OLD, OTHER, OTHER, OTHER),
    (DEMO, "bfloat16"): (NEW, OLD, NEW, OTHER, OTHER),
    (USUAL, "float32"): (NEW, OLD, NEW, OTHER, OLD),
    (USUAL, "bfloat16"): (UNKNOWN, UNKNOWN, UNKNOWN, OTHER, UNKNOWN),
}


@pytest.mark.parametrize("lr", [DEMO, USUAL])
async def test_what_answers_alone_tell(
    engine: TorchEngine, versions: Callable[..., Versions], lr: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = versions("bfloat16", lr)
    answers = made.proof.model_copy(update={"digests": []})

    verdicts = {fault: await judged(engine, made, fault, answers, monkeypatch) for fault in made.folders}

    expected = BY_ANSWERS[lr, str(engine._decoder.dtype).removeprefix("torch.")]
    assert verdicts == dict(zip(made.folders, expected, strict=True))


@pytest.mark.parametrize("lr", [DEMO, USUAL])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_what_a_server_tells_that_gives_no_digests(
    versions: Callable[..., Versions], dtype: str, lr: float, tmp_path: Path
) -> None:
    """SGLang's protocol, with answers of the real weights; besides, answers that do not change at all are old ones."""
    made = versions("bfloat16", lr)
    decoder = TorchEngine(RolloutSettings(model_path=TINY_MODEL, device="cpu", dtype=dtype))._decoder  # pyright: ignore[reportArgumentType]
    held = {fault: torch_engine.load(decoder, folder) for fault, folder in made.folders.items()}
    for folder in made.folders.values():
        sglang_fake.write_weights(tmp_path / folder.name, 0)
    verdicts = {}
    for fault in made.folders:
        fake = Fake(tmp_path / "1")
        async with sglang_fake.serving(fake, free_port()) as url:
            settings = RolloutSettings(engine="sglang", engine_url=url, model_path=tmp_path / "1", dtype=dtype)  # pyright: ignore[reportArgumentType]

            def score(ids: list[int], fake: Fake = fake, fault: str = fault) -> list[float]:
                with torch.inference_mode():
                    return decoder.score(held[fault if Path(fake.name).name == "2" else "old kept"], ids)

            fake.score = score
            async with started(SglangEngine(settings)) as engine:
                verdicts[fault] = await outcome(engine, tmp_path / "2", made.proof)
        assert fake.crimes == []

    by_answers = dict(zip(made.folders, BY_ANSWERS[lr, dtype], strict=True))
    assert verdicts == {**by_answers, "old kept": Verdict.STALE}


async def outcome(engine: SglangEngine, folder: Path, proof: WeightProof) -> Verdict:
    try:
        await engine.load_weights(folder, 2, proof)
    except TrackwayError as error:
        assert engine.version == 0
        return Verdict(str(error.detail["verdict"]))
    assert engine.judgement is not None
    assert engine.judgement.verdict.accepted
    return engine.judgement.verdict


async def test_a_version_that_changes_nothing_is_proven_and_without_digests_no_failure(
    engine: TorchEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = make_versions(TINY_MODEL, sampled(), tmp_path, "bfloat16", TOO_SMALL)
    answers = made.proof.model_copy(update={"digests": []})

    assert await judged(engine, made, "old kept", made.proof, monkeypatch) is Verdict.PROVEN
    assert await judged(engine, made, "old kept", answers, monkeypatch) is Verdict.INDISTINGUISHABLE


@pytest.mark.parametrize("fault", ["old kept", "one left out", "two swapped", "another run"])
async def test_the_simulated_engine_takes_no_files_but_those_that_were_published(
    versions: Callable[..., Versions], fault: str
) -> None:
    made, sim = versions("bfloat16", USUAL), SimEngine(RolloutSettings())
    await sim.start()
    before = made.proof.model_copy(update={"digests": []})
    await sim.load_weights(made.folders["right"], 1, before)
    with pytest.raises(TrackwayError, match="other than published") as raised:
        await sim.load_weights(made.folders[fault], 2, made.proof)
    assert (raised.value.code, sim.version) == (ErrorCode.WEIGHTS_CORRUPT, 1)
    await sim.load_weights(made.folders["right"], 2, made.proof)
    await sim.stop()
    assert sim.judgement is not None
    assert (sim.version, sim.judgement.verdict) == (2, Verdict.PROVEN)


async def test_a_replica_that_follows_a_store_tells_what_it_proved(
    engine: TorchEngine, versions: Callable[..., Versions], tmp_path: Path
) -> None:
    made, store = versions("bfloat16", USUAL), WeightStore(str(tmp_path / "store"))
    base = WholeWeights(store.publish(1, "run", made.folders["old kept"], made.before), made.folders["old kept"])
    store.publish(2, "run", made.folders["right"], proof=made.proof, base=base)

    manifest = store.manifest(2)

    assert manifest.proof == made.proof
    assert manifest.delta is not None
    assert sum(file.size for file in manifest.delta.files) < 0.1 * sum(file.size for file in manifest.files)
    await engine.load_weights(store.fetch(2, tmp_path / "cache"), 2, manifest.proof)
    assert engine.judgement is not None
    assert engine.judgement.verdict is Verdict.PROVEN


def scale(tensors: Tensors) -> None:
    tensors[LEFT_OUT] *= 2


def spoil(tensors: Tensors) -> None:
    tensors[LEFT_OUT][0, 0] = math.nan


@pytest.mark.parametrize("poison", [scale, spoil, swap])
async def test_a_poisoned_delta_whose_files_have_their_digests_is_refused(
    engine: TorchEngine,
    versions: Callable[..., Versions],
    tmp_path: Path,
    poison: Callable[[Tensors], object],
) -> None:
    made, store = versions("bfloat16", USUAL), WeightStore(str(tmp_path / "store"))
    old, poisoned = made.folders["old kept"], planted(made.folders["right"], tmp_path / "poisoned", poison)
    base = WholeWeights(store.publish(1, "run", old, made.before), old)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        assert store.publish(2, "run", poisoned, made.proof, base=base).delta is not None
        with pytest.raises(TrackwayError, match=LEFT_OUT if poison is not swap else "other than published") as raised:
            await watcher.catch_up(2)

    assert (raised.value.code, engine.version) == (ErrorCode.WEIGHTS_CORRUPT, 1)
