"""Tiny tied models that vLLM's CPU build can run, what transformers says about them, and engines on them."""

import contextlib
import json
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from tokenizers.models import BPE
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from tests.waiting import async_until
from trackway.rollout.engines.protocol import Generation
from trackway.rollout.engines.remote.engine import RemoteEngine
from trackway.rollout.engines.remote.vllm import VllmEngine
from trackway.rollout.settings import RolloutSettings
from trackway.wire.rollout import SamplingParams
from trackway.wire.weights import Probe, Verdict, WeightProof

MARKS = [pytest.mark.anyio, pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(900)]
"""Of every test here; the first of a session waits for vLLM's start, too."""
DEVICE = "cuda" if os.environ.get("TRACKWAY_TEST_DEVICE") == "cuda" else "cpu"
"""Device of the servers; `make gpu-check` runs these tests on a GPU."""
ENVIRONMENT = Path(__file__).parents[2] / (".venv-vllm" if DEVICE == "cpu" else ".venv-vllm-cuda")
PLACED: dict[str, Any] = {"device": DEVICE, "dtype": "float32"} | (
    {}
    if DEVICE == "cpu"
    else {
        "gpu_memory_utilization": 0.15,  # several servers at a time
        "tensor_parallel_size": int(os.environ.get("TRACKWAY_TEST_TENSOR_PARALLEL", "1")),
    }
)
"""Settings of every replica."""
if DEVICE == "cuda":  # float32 of the servers is float32: TF32 would hide what the tests compare
    os.environ |= {"NVIDIA_TF32_OVERRIDE": "0", "TRITON_F32_DEFAULT": "ieee"}
VOCAB = 96
EOS = 30
"""A token that the model of seed 0 makes often."""
MAX_LEN = 1024
DEADLINE_S = 120.0
"""Of whatever a test waits for; a machine with much other work takes seconds for what takes milliseconds."""
BLOCK = 128
"""Tokens of a KV block: vLLM reuses prefixes of whole blocks only."""
SERVER_ARGUMENTS: list[str] = [] if DEVICE == "cpu" else ["--block-size", str(BLOCK)]
"""Arguments of any server."""
TOOL_ARGUMENTS = ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
"""Arguments of a server whose chat completions have tool calls."""

PROMPT = [11, 12, 13]
LONG = SamplingParams(max_tokens=300, ignore_eos=True, seed=1)
SHORT = SamplingParams(max_tokens=8, ignore_eos=True, seed=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)

Engine = TypeVar("Engine", bound=RemoteEngine)


Replica = VllmEngine
OTHER_PREFIX = Verdict.WRONG
"""An adapter whose tensors have another prefix: vLLM takes it and answers as the base model."""


class CanBeMisled(RemoteEngine):
    """Loads a different folder than requested, for whole weights and for adapters."""

    def __init__(self, settings: RolloutSettings) -> None:
        super().__init__(settings)
        self.instead: dict[Path, Path] = {}


class Misled(CanBeMisled, VllmEngine):
    """vLLM, misled."""

    async def _reload(self, folder: Path) -> None:
        await super()._reload(self.instead.get(folder, folder))

    async def load_adapter(self, folder: Path, name: str) -> None:
        await super().load_adapter(self.instead.get(folder, folder), name)


class Weights(NamedTuple):
    """One published set of weights, and what transformers knows about it."""

    folder: Path
    model: PreTrainedModel
    proof: WeightProof


def build(folder: Path, seed: int) -> Path:
    """A random Qwen3 with tied embeddings, saved as transformers saves it: without `lm_head.weight`."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,  # the smallest that vLLM's attention on the CPU takes
        max_position_embeddings=MAX_LEN,
        eos_token_id=EOS,
        initializer_range=0.3,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # transformers starts them at 1, which hides errors
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each printable ASCII character but the tilde, for a newline, and for the end of a sequence."""
    characters = [*(chr(code) for code in range(33, 33 + VOCAB - 3)), "\u010a"]
    vocab = {name: place for place, name in enumerate([*characters[:EOS], "<eos>", *characters[EOS:], "\u0120"])}
    bytewise = Tokenizer(BPE(vocab, []))
    bytewise.decoder = ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<eos>")


def published(base: Path, folder: Path) -> Path:
    """The weights of `base` as our trainer publishes them: `lm_head.weight` spelled out."""
    folder.mkdir()
    weights = load_file(base / "model.safetensors")
    save_file({**weights, "lm_head.weight": weights["model.embed_tokens.weight"].clone()}, folder / "model.safetensors")
    (folder / "config.json").write_text((base / "config.json").read_text())
    return folder


def load(folder: Path) -> PreTrainedModel:
    """The model of a folder for transformers, in float32."""
    return Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def logprobs_of(
    model: PreTrainedModel, tokens: list[int], start: int, params: SamplingParams | None = None
) -> list[float]:
    """Transformers' logprobs of tokens[start:] under the distribution that they were drawn from."""
    params = params or SamplingParams()
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
    logits = logits / (params.temperature or 1.0)
    if params.top_k > 0:
        logits = logits.masked_fill(logits < logits.topk(params.top_k).values[:, -1:], -torch.inf)
    if params.top_p < 1:
        ordered, order = logits.sort(descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        outside = (before >= params.top_p).scatter(1, order, before >= params.top_p)
        logits = logits.masked_fill(outside, -torch.inf)
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(tokens[start:])[:, None])[:, 0].tolist()


def worst(generation: Generation, model: PreTrainedModel, params: SamplingParams, prompt: list[int] = PROMPT) -> float:
    """The largest difference between an engine's logprobs and transformers'."""
    want = logprobs_of(model, [*prompt, *generation.token_ids], len(prompt), params)
    return max(abs(ours - theirs) for ours, theirs in zip(generation.logprobs, want, strict=True))


def assert_split(
    made: Generation, version: int, model: PreTrainedModel, params: SamplingParams, prompt: list[int] = PROMPT
) -> None:
    """Check that spans change where logprobs stop matching the model's first weights."""
    cut = made.spans[0].end
    assert [(s.version, s.start, s.end, s.kv_version) for s in made.spans] == [
        (version, 0, cut, None),
        (version + 1, cut, params.max_tokens, version),
    ]
    assert 0 < cut < params.max_tokens
    off = [
        worst(Generation(made.token_ids[:end], made.logprobs[:end], "length", []), model, params, prompt)
        for end in (cut, cut + 1)
    ]
    assert off[0] < 1e-4 < off[1]


def proof_of(model: PreTrainedModel, shift: float = 0.0) -> WeightProof:
    """What a publisher says about its model; `shift` makes it wrong."""
    tokens = list(range(3, 35))
    logprobs = [logprob + shift for logprob in logprobs_of(model, tokens, 1)]
    return WeightProof(probes=[Probe(token_ids=tokens, positions=list(range(1, 32)), logprobs=logprobs)])


def settings_of(model_path: Path, log: Path, **more: Any) -> RolloutSettings:
    """Settings of a replica with vLLM beside it, whose steps `slowed` can slow down."""
    steps = json.dumps({"steps": str(log.with_suffix(".steps"))})
    slow = ["--scheduler-cls", "tests.vllm.slow_scheduler.SlowScheduler", "--additional-config", steps]
    return RolloutSettings(
        engine="vllm",
        engine_python=ENVIRONMENT / "bin" / "python",
        engine_log=log,
        engine_args=[*slow, *SERVER_ARGUMENTS],
        model_path=model_path,
        enforce_eager=True,  # without torch.compile: the start takes half as long
        max_num_seqs=4,
        max_queue=2,
        weight_wait_s=DEADLINE_S,
        **{**PLACED, **more},
    )


@asynccontextmanager
async def started(engine: Engine) -> AsyncIterator[Engine]:
    """The engine, which runs; its server ends with the block."""
    try:
        with contextlib.chdir(Path(__file__).parents[2]):  # where the server's interpreter finds its scheduler
            await engine.start()
        yield engine
    finally:
        await engine.stop()


class Tally(NamedTuple):
    """What vLLM works on: the tokens of each request that runs, and how many wait for a place."""

    running: list[int]
    waiting: int


def tally(engine: VllmEngine) -> Tally:
    """Of the engine's own server, as its scheduler tells it."""
    return Tally(**json.loads((_steps(engine) / "tally.json").read_text()))


@asynccontextmanager
async def slowed(engine: VllmEngine) -> AsyncIterator[None]:
    """In the block the LONG request takes more than seven minutes: what a test does there comes before its end."""
    slow = _steps(engine) / "slow"
    slow.touch()
    try:
        yield
    finally:
        slow.unlink()


async def busy(engine: VllmEngine, running: int = 1, waiting: int = 0) -> None:
    """Return when vLLM works on so many requests, each with a token to show, and so many wait for a place."""

    def so_busy() -> bool:
        now = tally(engine)
        return (len(now.running), now.waiting) == (running, waiting) and 0 not in now.running

    await async_until(so_busy)
    await engine.http.get("/weight_info")  # comes the way of the tokens: vLLM's front, which answers aborts, has them


async def idle(engine: VllmEngine) -> None:
    """Return when vLLM works on nothing."""
    await busy(engine, running=0)


async def stands_still(engine: VllmEngine) -> bool:
    """Whether vLLM makes no token between answers of its core, which steps after each answer unless it is frozen."""
    before = tally(engine)
    for _ in range(3):
        await engine.http.get("/weight_info")
    return tally(engine) == before


async def metrics(engine: VllmEngine) -> dict[str, float]:
    """vLLM's own counters, by name."""
    text = (await engine.http.get("/metrics"))["text"]
    found = re.findall(r"^vllm:(\w+){[^}]*} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


def _steps(engine: VllmEngine) -> Path:
    """The folder through which its scheduler talks."""
    assert engine.settings.engine_log is not None
    return engine.settings.engine_log.with_suffix(".steps")


def server_of(engine: RemoteEngine) -> list[psutil.Process]:
    """The server's processes, its own first."""
    port = engine.http.base_url.rpartition(":")[2]
    [server] = (
        p for p in psutil.Process().children(recursive=True) if p.cmdline()[1:2] == ["-m"] and port in p.cmdline()
    )
    return [server, *server.children(recursive=True)]
