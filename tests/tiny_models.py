"""Random models of a few thousand parameters."""

from pathlib import Path
from typing import Any

import torch
from transformers import Qwen3Config, Qwen3ForCausalLM


def tiny_qwen3(folder: Path, seed: int = 0, **config: Any) -> Path:
    """Save a random Qwen3 into the folder and return it: one layer, tied, vocabulary 64, unless `config` differs."""
    sizes = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 32}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    torch.manual_seed(seed)
    model = Qwen3ForCausalLM(Qwen3Config(**{**sizes, **heads, "tie_word_embeddings": True, **config}))
    model.save_pretrained(folder)
    return folder
