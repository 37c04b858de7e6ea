"""The embedded engine names what is wrong when another adapter replaces the one that the learner published."""

import math
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.attacks.test_planted_weights import sampled
from tests.services.rollout.engine_runs import started, watching
from tests.services.rollout.planted_adapters import (
    ALPHA,
    RANK,
    AdapterVersions,
    Tensors,
    changed,
    make_adapters,
    scaled,
    with_config,
)
from tests.weight_proofs import ANY_PROOF
from trackway.clients.weights import WeightStore
from trackway.deploy.bundled import TINY_MODEL
from trackway.rollout.engines.torch import engine as torch_engine
from trackway.rollout.engines.torch.decoder import Decoder, DecoderWeights
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Verdict

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> AdapterVersions:
    """Made once."""
    return make_adapters(TINY_MODEL, sampled(), tmp_path_factory.mktemp("adapters"))


@pytest.fixture
async def engine() -> AsyncIterator[TorchEngine]:
    """The embedded engine, with the base weights."""
    async with started(TorchEngine(RolloutSettings(model_path=TINY_MODEL, device="cpu", max_num_seqs=2))) as engine:
        yield engine


async def test_the_proof_tells_an_adapter_from_the_base_from_the_one_before_and_from_one_scaled_twice(
    engine: TorchEngine, versions: AdapterVersions, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge, verdicts = torch_engine.load_merged, dict[str, Verdict]()
    for fault in ("right", "old kept", "scaled twice", "answers as the base"):

        def load(decoder: Decoder, base: Path, _: Path, fault: str = fault) -> DecoderWeights:
            folder = versions.folders.get(fault)
            return torch_engine.load(decoder, base) if folder is None else merge(decoder, base, folder)

        await engine.load_weights(versions.folders["old kept"], 1, versions.before)
        with monkeypatch.context() as planting:
            planting.setattr(torch_engine, "load_merged", load)
            try:
                await engine.load_weights(versions.folders["right"], 2, versions.proof)
            except TrackwayError as error:
                verdicts[fault] = Verdict(str(error.detail["verdict"]))
            else:
                assert engine.judgement is not None and engine.judgement.verdict.accepted
                verdicts[fault] = engine.judgement.verdict

    assert verdicts == {
        "right": Verdict.ROUNDED,
        "old kept": Verdict.STALE,
        "scaled twice": Verdict.WRONG,
        "answers as the base": Verdict.WRONG,
    }


async def test_an_adapter_of_other_layers_is_refused_by_name_and_the_weights_stay(
    engine: TorchEngine, versions: AdapterVersions
) -> None:
    await engine.load_weights(versions.folders["old kept"], 1, versions.before)

    with pytest.raises(TrackwayError, match=r"base_model\.model\.lm\.model\.layers"):
        await engine.load_weights(versions.folders["other prefix"], 2, versions.proof)

    assert engine.version == 1


async def test_each_adapter_replaces_the_one_before_and_nothing_computed_with_that_is_reused(
    engine: TorchEngine, versions: AdapterVersions
) -> None:
    prompt = list(range(3, 60))
    for version, (name, adapter) in enumerate((("1", "old kept"), ("2", "right"), ("2", "right")), start=1):
        await engine.load_weights(versions.folders[adapter], version, ANY_PROOF)
        before = engine.stats().reused_tokens
        made = await engine.generate(prompt, GREEDY, "adapter")
        assert engine.stats().reused_tokens == before
        await engine.load_weights(versions.whole[name], version + 10, ANY_PROOF)
        whole = await engine.generate(prompt, GREEDY, "whole")
        assert made.token_ids == whole.token_ids
        assert made.logprobs == pytest.approx(whole.logprobs, abs=1e-4)


async def test_a_prompt_is_scored_with_the_adapter(engine: TorchEngine, versions: AdapterVersions) -> None:
    ids = torch.tensor([[*range(3, 60)]])
    await engine.load_weights(versions.folders["right"], 1, ANY_PROOF)
    params = GREEDY.model_copy(update={"prompt_logprobs": 3})
    scores = (await engine.generate(ids[0].tolist(), params, "a")).prompt_logprobs
    with torch.inference_mode():
        logits = AutoModelForCausalLM.from_pretrained(versions.whole["2"]).float()(ids).logits[0, :-1]
    logprobs = logits.log_softmax(-1)
    assert scores is not None
    assert scores.logprobs == pytest.approx(logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist(), abs=1e-4)
    assert scores.top_ids == logprobs.topk(3).indices.tolist()


async def test_a_replica_that_follows_a_store_takes_adapters_from_it(
    engine: TorchEngine, versions: AdapterVersions, tmp_path: Path
) -> None:
    store = WeightStore(str(tmp_path / "store"))
    store.publish(1, "run", versions.folders["old kept"], versions.before)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        store.publish(2, "run", versions.folders["right"], proof=versions.proof)
        await watcher.catch_up(2)

    assert engine.judgement is not None
    assert engine.judgement.verdict is Verdict.ROUNDED


def halved(tensors: Tensors) -> Tensors:
    """An adapter of half the rank."""
    half = RANK // 2
    cut = {name: tensor[:half] if ".lora_A." in name else tensor[:, :half] for name, tensor in tensors.items()}
    return {name: tensor.contiguous() for name, tensor in cut.items()}


def swapped(tensors: Tensors) -> Tensors:
    """With the matrices of two layers exchanged, which no shape tells apart."""
    return {
        name: tensors[name.translate(str.maketrans("01", "10"))] if ".q_proj.lora_A." in name else tensor
        for name, tensor in tensors.items()
    }


def spoiled(tensors: Tensors) -> Tensors:
    """With one NaN."""
    tensors[next(iter(tensors))][0, 0] = math.nan
    return tensors


POISONS: dict[str, Callable[[Path, Path], Path]] = {
    "scaled twice": lambda right, into: changed(right, into, scaled),
    "alpha doubled": lambda right, into: with_config(right, into, lora_alpha=2 * ALPHA),
    "no effect": lambda right, into: changed(right, into, lambda tensors: scaled(tensors, 0.0)),
    "half of the rank": lambda right, into: with_config(
        changed(right, into.with_name("cut"), halved), into, r=RANK // 2, lora_alpha=ALPHA // 2
    ),
    "another rank in the configuration": lambda right, into: with_config(right, into, r=2 * RANK),
    "two layers swapped": lambda right, into: changed(right, into, swapped),
    "NaN": lambda right, into: changed(right, into, spoiled),
}


@pytest.mark.parametrize("poison", POISONS)
async def test_a_poisoned_adapter_whose_files_have_their_digests_is_refused(
    engine: TorchEngine, versions: AdapterVersions, tmp_path: Path, poison: str
) -> None:
    poisoned = POISONS[poison](versions.folders["right"], tmp_path / "poisoned")
    store = WeightStore(str(tmp_path / "store"))
    store.publish(1, "run", versions.folders["old kept"], versions.before)
    async with watching(engine, store, tmp_path / "cache") as watcher:
        store.publish(2, "run", poisoned, versions.proof)
        with pytest.raises(TrackwayError) as raised:
            await watcher.catch_up(2)

    assert (raised.value.code, engine.version) == (ErrorCode.WEIGHTS_CORRUPT, 1)
