"""Checks of results: engine and learner in bfloat16 against float32, sleep, offloading, ranks, the proof of weights."""

import asyncio
import gc
import math
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import distributed
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from tests.gpu_check.model import Shape, prompts, reference
from tests.services.rollout.planted_weights import batch, make_versions
from tests.services.trainer.learner_settings import learner_config
from trackway.learner.learner import Learner
from trackway.learner.ranks.sharding import ALONE, Ranks, join
from trackway.rollout.engines.protocol import Generation
from trackway.rollout.engines.torch import engine as torch_engine
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.engines.torch.weights import SleepingWeights
from trackway.rollout.settings import RolloutSettings
from trackway.run_config.placement import Placement
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams
from trackway.wire.trajectory import Trajectory

GROUPS, ROLLOUTS, PROMPT, RESPONSE = 4, 4, 48, 48
"""Of the batch that all checks share; lengths in tokens, that of the longest response."""
FLOAT32, BFLOAT16_MEAN, BFLOAT16_MAX = 2e-3, 0.03, 0.5
"""Largest differences of logprobs: in float32 of other kernels (all), in bfloat16 on average and at most."""
SHARE = 0.05
"""Largest relative difference of a metric in bfloat16, and of memory."""
SAME = 1e-4
"""Largest difference of logprobs of one request that is computed twice."""
LR = 3e-4


@dataclass(frozen=True)
class Finding:
    """A property that was checked."""

    what: str
    expected: str
    got: str
    holds: bool

    @classmethod
    def below(cls, what: str, value: float, limit: float) -> "Finding":
        """A value that has to be at most `limit`; NaN is not."""
        return cls(what, f"<= {limit:g}", f"{value:.3g}", value <= limit)

    @classmethod
    def equal(cls, what: str, expected: object, got: object) -> "Finding":
        """A value that has to be this one."""
        return cls(what, str(expected), str(got), got == expected)


@dataclass(frozen=True)
class Subject:
    """The model that is checked, and a batch that its own engine sampled in float32."""

    shape: Shape
    folder: Path
    device: torch.device
    generations: Sequence[Generation]

    @property
    def prompts(self) -> list[list[int]]:
        """One per rollout."""
        return [prompt for prompt in prompts(self.shape, GROUPS, PROMPT) for _ in range(ROLLOUTS)]

    @property
    def trajectories(self) -> list[Trajectory]:
        """The batch, with rewards that differ within each group."""
        pairs = [(prompt, list(made.token_ids)) for prompt, made in zip(self.prompts, self.generations, strict=True)]
        return [
            trajectory.model_copy(update={"response_logprobs": list(made.logprobs)})
            for trajectory, made in zip(batch(pairs, good=1), self.generations, strict=True)
        ]


def subject(shape: Shape, folder: Path, device: torch.device) -> Subject:
    """The model, written to the folder, and its batch."""
    shape.write(folder)
    asked = [prompt for prompt in prompts(shape, GROUPS, PROMPT) for _ in range(ROLLOUTS)]
    return Subject(shape, folder, device, generate(folder, device, "float32", asked))


def engine_of(folder: Path, device: torch.device, dtype: str, slots: int = GROUPS * ROLLOUTS) -> TorchEngine:
    """An embedded engine that is not started."""
    settings = RolloutSettings(
        model_path=folder,
        device="cuda" if device.type == "cuda" else "cpu",
        dtype="bfloat16" if dtype == "bfloat16" else "float32",
        max_num_seqs=slots,
        max_model_len=1024,
        enable_sleep=True,
    )
    return TorchEngine(settings)


def generate(folder: Path, device: torch.device, dtype: str, asked: Sequence[list[int]]) -> list[Generation]:
    """Continuations of the prompts, of different lengths, by an engine of its own."""

    async def run() -> list[Generation]:
        engine = engine_of(folder, device, dtype)
        await engine.start()
        try:
            requests = [
                engine.generate(prompt, SamplingParams(max_tokens=RESPONSE - n, ignore_eos=True, seed=n), str(n))
                for n, prompt in enumerate(asked)
            ]
            return await asyncio.gather(*requests)
        finally:
            await engine.stop()

    return asyncio.run(run())


def check_engine(subject: Subject) -> list[Finding]:
    """The logprobs of what the engine sampled, in both types, against transformers in float32."""
    model = reference(subject.folder, subject.device)
    found: list[Finding] = []
    for dtype in ("float32", "bfloat16"):
        made = (
            subject.generations
            if dtype == "float32"
            else generate(subject.folder, subject.device, dtype, subject.prompts)
        )
        off = [
            abs(ours - theirs)
            for prompt, generation in zip(subject.prompts, made, strict=True)
            for ours, theirs in zip(
                generation.logprobs, _logprobs(model, prompt, list(generation.token_ids)), strict=True
            )
        ]
        if dtype == "float32":
            found.append(Finding.below("logprobs in float32, largest difference", _largest(off), FLOAT32))
        else:
            found.append(Finding.below("logprobs in bfloat16, mean difference", sum(off) / len(off), BFLOAT16_MEAN))
            found.append(Finding.below("logprobs in bfloat16, largest difference", _largest(off), BFLOAT16_MAX))
    return found


def check_learner(subject: Subject) -> list[Finding]:
    """Logprobs and one update in bfloat16 against float32, padded and packed, and against the sampler."""
    exact, exact_metrics = _trained(subject, "float32")
    found = [Finding.below("sampler against learner in float32, largest", _mismatch(subject, exact), FLOAT32)]
    for dtype, packed in (("float32", True), ("bfloat16", False), ("bfloat16", True)):
        logprobs, metrics = _trained(subject, dtype, packed)
        off = [abs(ours - theirs) for ours, theirs in zip(_flat(logprobs), _flat(exact), strict=True)]
        name = f"{dtype}, {'packed' if packed else 'padded'}"
        limit = FLOAT32 if dtype == "float32" else BFLOAT16_MEAN
        value = _largest(off) if dtype == "float32" else sum(off) / len(off)
        found.append(Finding.below(f"logprobs in {name}, {'largest' if dtype == 'float32' else 'mean'}", value, limit))
        for metric in ("actor/grad_norm", "actor/entropy"):
            apart = abs(metrics[metric] - exact_metrics[metric]) / abs(exact_metrics[metric])
            found.append(Finding.below(f"{metric} in {name}, relative", apart, SHARE))
    return found


def check_checkpoints(subject: Subject, folder: Path) -> list[Finding]:
    """A learner that loads a checkpoint updates as the one that saved it, also one of an adapter, and offloaded."""
    found: list[Finding] = []
    kinds: dict[str, dict[str, object]] = {
        "whole": {},
        "LoRA": {"lora_rank": 8, "lora_alpha": 16},
        "offloaded": {"param_offload": True, "optimizer_offload": True},
    }
    for kind, settings in kinds.items():
        config = learner_config(subject.folder, device=str(subject.device), lr=LR, micro_batch_size=4, **settings)
        saved = Learner(config)
        saved.update(subject.trajectories)
        saved.save(folder / kind)
        expected = saved.update(subject.trajectories).metrics["actor/grad_norm"]
        del saved
        loaded = Learner(config)
        loaded.load(folder / kind)
        apart = abs(loaded.update(subject.trajectories).metrics["actor/grad_norm"] / expected - 1)
        found.append(Finding.below(f"actor/grad_norm after loading, {kind}, relative", apart, FLOAT32))
    return found


def check_offload(subject: Subject) -> list[Finding]:
    """Weights and moments are away between updates, and change no result."""
    _, expected = _trained(subject, "float32")
    away = {"param_offload": True, "optimizer_offload": True}
    learner = Learner(learner_config(subject.folder, device=str(subject.device), lr=LR, **away))
    metrics = learner.update(subject.trajectories).metrics
    apart = max(abs(metrics[name] - expected[name]) for name in ("actor/grad_norm", "actor/pg_loss"))
    found = [Finding.below("largest difference of gradient norm and loss", apart, FLOAT32)]
    if subject.device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        left = torch.cuda.memory_allocated() / 2**20
        weights = sum(parameter.numel() for parameter in learner.policy.model.parameters()) * 4 / 2**20
        found.append(Finding.below("memory on the GPU after an update, of the weights", left / weights, 0.05))
    return found


def check_sleep(subject: Subject) -> list[Finding]:
    """Sleep releases memory, answers after the wake-up are those before, and a wake-up without weights is refused."""
    return asyncio.run(_slept(engine_of(subject.folder, subject.device, _own_dtype(subject.device)), subject))


async def _slept(engine: TorchEngine, subject: Subject) -> list[Finding]:
    async def answers() -> list[Generation]:
        params = SamplingParams(max_tokens=RESPONSE, ignore_eos=True, seed=1)
        return [await engine.generate(prompt, params, "alone") for prompt in subject.prompts[::ROLLOUTS]]

    async def sleep() -> None:
        await engine.pause("wait")
        await engine.sleep(("weights", "kv_cache"))

    await engine.start()
    try:
        before, awake, own = await answers(), _memory(engine), _tensors_of(engine)
        await sleep()
        asleep = _memory(engine)
        await engine.wake_up(("weights", "kv_cache"))
        await engine.resume()
        again, after = _memory(engine), await answers()
        await sleep()
        with _unrestored():
            planted = await _code(engine.wake_up(("weights", "kv_cache")))
    finally:
        await engine.stop()
    tokens = [list(made.token_ids) for made in after] == [list(made.token_ids) for made in before]
    pairs = zip(_flat([list(m.logprobs) for m in before]), _flat([list(m.logprobs) for m in after]), strict=True)
    off = _largest([abs(ours - theirs) for ours, theirs in pairs])
    sizes = ", ".join(f"{size / 2**20:.1f}" for size in (awake, asleep, again))
    holds = awake - asleep >= (1 - SHARE) * own and abs(again - awake) <= SHARE * own
    return [
        Finding("MiB before, asleep, after", f"{own / 2**20:.1f} less asleep", sizes, holds),
        Finding.equal("same tokens after", True, tokens),
        Finding.below("logprobs after, largest difference", off, SAME),
        Finding.equal("a wake-up without restoring the weights", "engine_failed", planted),
    ]


def _own_dtype(device: torch.device) -> str:
    return "bfloat16" if device.type == "cuda" else "float32"


def _tensors_of(engine: TorchEngine) -> int:
    """Bytes of weights and KV cache."""
    assert engine._core is not None
    tensors = [*engine._core.weights.tensors(), engine._core._cache.data]
    return sum(tensor.nbytes for tensor in tensors if tensor.device.type != "meta")


def _memory(engine: TorchEngine) -> int:
    """Bytes on the GPU; on a CPU those of the engine's tensors."""
    return torch.cuda.memory_allocated() if engine._decoder.device.type == "cuda" else _tensors_of(engine)


@contextmanager
def _unrestored() -> Iterator[None]:
    """Wake-ups allocate memory for weights and restore nothing."""
    copied_back = SleepingWeights._copied_back

    def nothing(self: SleepingWeights) -> list[torch.Tensor]:
        return [torch.zeros(shape.shape, dtype=shape.dtype, device=self._device) for shape in self.shapes.tensors()]

    SleepingWeights._copied_back = nothing
    try:
        yield
    finally:
        SleepingWeights._copied_back = copied_back


async def _code(work: Coroutine[None, None, None]) -> str:
    try:
        await work
    except TrackwayError as error:
        return error.code
    return "no error"


def check_proof(subject: Subject, folder: Path) -> list[Finding]:
    """Right weights are accepted in bfloat16, and planted wrong ones are refused by name."""
    pairs = [(prompt, list(made.token_ids)) for prompt, made in zip(subject.prompts, subject.generations, strict=True)]
    versions = make_versions(subject.folder, pairs, folder, "bfloat16", LR, str(subject.device))

    async def verdicts() -> dict[str, str]:
        engine, load, found = engine_of(subject.folder, subject.device, "bfloat16"), torch_engine.load, {}
        await engine.start()
        for name, held in versions.folders.items():
            await engine.load_weights(versions.folders["old kept"], 1, versions.before)
            torch_engine.load = lambda decoder, _, held=held: load(decoder, held)
            try:
                await engine.load_weights(versions.folders["right"], 2, versions.proof)
            except TrackwayError as error:
                found[name] = str(error.detail["verdict"])
            else:
                found[name] = "accepted"
            finally:
                torch_engine.load = load
        await engine.stop()
        return found

    wanted = dict.fromkeys(versions.folders, "wrong") | {"right": "accepted", "old kept": "stale"}
    found = asyncio.run(verdicts())
    return [Finding.equal(name, wanted[name], found[name]) for name in wanted]


def check_ranks(subject: Subject) -> list[Finding]:
    """A learner whose weights FSDP2 shards over one rank gives the results of one without, offloaded by FSDP2 too."""
    logprobs, expected = _trained(subject, "float32")
    store = TCPStore("127.0.0.1", 0, is_master=True)
    found: list[Finding] = []
    try:
        ranks = join(store, 0, Placement(), subject.device.type, 60.0)
        for name, offload in {"": False, " with weights in main memory": True}.items():
            sharded, metrics = _trained(subject, "float32", ranks=ranks, offload=offload)
            off = [abs(ours - theirs) for ours, theirs in zip(_flat(sharded), _flat(logprobs), strict=True)]
            apart = abs(metrics["actor/grad_norm"] / expected["actor/grad_norm"] - 1)
            found.append(Finding.below(f"logprobs{name}, largest difference", _largest(off), FLOAT32))
            found.append(Finding.below(f"actor/grad_norm{name}, relative", apart, FLOAT32))
    finally:
        distributed.destroy_process_group()
    return found


CHECKS: dict[str, Callable[[Subject, Path], list[Finding]]] = {
    "engine": lambda subject, _: check_engine(subject),
    "learner": lambda subject, _: check_learner(subject),
    "sleep and wake-up": lambda subject, _: check_sleep(subject),
    "offload": lambda subject, _: check_offload(subject),
    "FSDP2, one rank": lambda subject, _: check_ranks(subject),
    "checkpoints": check_checkpoints,
    "proof of weights": check_proof,
}
"""By name: what is checked, given the subject and an empty folder."""


def _trained(
    subject: Subject, dtype: str, packed: bool = False, ranks: Ranks = ALONE, offload: bool = False
) -> tuple[list[list[float]], dict[str, float]]:
    """The logprobs of the batch before an update, and the update's metrics."""
    config = learner_config(
        subject.folder,
        device=str(subject.device),
        dtype=dtype,
        lr=LR,
        remove_padding=packed,
        micro_batch_size=4,
        calculate_entropy=True,
        offload_policy=offload,
    )
    learner = Learner(config, ranks)
    return learner.log_probs(subject.trajectories), learner.update(subject.trajectories).metrics


def _mismatch(subject: Subject, logprobs: Sequence[Sequence[float]]) -> float:
    sampled = _flat([list(made.logprobs) for made in subject.generations])
    return _largest([abs(ours - theirs) for ours, theirs in zip(sampled, _flat(logprobs), strict=True)])


def _flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [value for row in rows for value in row]


def _largest(values: Sequence[float]) -> float:
    """The largest value; NaN if one is."""
    return math.nan if any(map(math.isnan, values)) else max(values)


@torch.inference_mode()
def _logprobs(model: torch.nn.Module, prompt: list[int], response: list[int]) -> list[float]:
    ids = torch.tensor([prompt + response], device=next(model.parameters()).device)
    logits = model(ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1).gather(-1, ids[0, len(prompt) :, None]).squeeze(-1).tolist()
