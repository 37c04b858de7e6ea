"""Random tiny models made by transformers, and engine cores on them."""

import itertools
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from trackway.rollout.engines.torch.core import EngineCore
from trackway.rollout.engines.torch.engine import TorchEngine
from trackway.rollout.engines.torch.scheduler import Sequence
from trackway.rollout.engines.torch.weights import load
from trackway.rollout.settings import RolloutSettings
from trackway.wire.errors import TrackwayError
from trackway.wire.rollout import SamplingParams

VOCAB = 97
EOS = 2
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "max_position_embeddings": 1024,
    "eos_token_id": EOS,
    "initializer_range": 0.3,
}
_CONFIGS: dict[str, Callable[[], PreTrainedConfig]] = {
    "qwen3": lambda: Qwen3Config(**_SIZES, num_attention_heads=4, num_key_value_heads=4),
    "qwen3-gqa": lambda: Qwen3Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2),
    "qwen3-tied": lambda: Qwen3Config(**_SIZES, num_attention_heads=6, num_key_value_heads=2, tie_word_embeddings=True),
    "qwen2": lambda: Qwen2Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2),
    "llama": lambda: LlamaConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=1, attention_bias=True),
    "mistral": lambda: MistralConfig(**_SIZES, num_attention_heads=4, num_key_value_heads=2, sliding_window=512),
    "phi3": lambda: Phi3Config(**_SIZES, num_attention_heads=4, num_key_value_heads=2, pad_token_id=0),
    "gemma": lambda: GemmaConfig(**_SIZES, num_attention_heads=6, num_key_value_heads=1),
}
FAMILIES = tuple(_CONFIGS)


def build(folder: Path, family: str = "qwen3-gqa", seed: int = 0) -> PreTrainedModel:
    """A random model, saved in `folder` as transformers saves it."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_CONFIGS[family]())
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)  # transformers starts them at 0 and 1, which hides errors
    model.save_pretrained(folder)
    return model.eval()


def reference_logprobs(model: PreTrainedModel, tokens: list[int], start: int, temperature: float) -> list[float]:
    """Transformers' logprobs of tokens[start:] given those before."""
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].float()
    logprobs = torch.log_softmax(logits / temperature, -1)
    return logprobs.gather(1, torch.tensor(tokens[start:])[:, None])[:, 0].tolist()


def core_of(folder: Path, slots: int = 8, max_len: int = 256) -> EngineCore:
    """An engine core without its thread."""
    engine = TorchEngine(RolloutSettings(model_path=folder, max_model_len=max_len, device="cpu"))
    return EngineCore(engine._decoder, load(engine._decoder, folder), 0, slots)


_ids = itertools.count()


def sequence(prompt: list[int], params: SamplingParams | None = None, limit: int | None = None) -> Sequence:
    """A request for the core, without stop tokens unless the parameters name some."""
    params = params or SamplingParams(max_tokens=8, seed=1)
    return Sequence(
        f"r{next(_ids)}", prompt, params, frozenset(params.stop_token_ids), limit=limit or params.max_tokens
    )


def run(core: EngineCore, *requests: Sequence, max_steps: int = 200) -> None:
    """Step the core until all requests are over; raises when one fails."""
    core.scheduler.waiting.extend(requests)
    with torch.inference_mode():
        for _ in range(max_steps):
            if not core.scheduler.busy:
                return
            for end in core.step():
                if isinstance(end.result, TrackwayError):
                    raise end.result
    raise AssertionError(f"requests still run after {max_steps} steps")
