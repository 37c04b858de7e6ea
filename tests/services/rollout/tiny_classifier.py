"""A classifier whose score is known: a function of the share that one token has in the input.

Its one layer attends to all tokens alike, so it averages what `v_proj` reads of them: 1 for the token `MARK`, else 0.
Nothing else of the model adds anything.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForSequenceClassification

from trackway.deploy.bundled import TINY_MODEL

MARK = 25
"""The token `7` of the bundled tiny model, whose tokenizer and chat template the classifier has."""
HIDDEN = 64
_SCALE = 3.0
_EPS = 1e-6


def write_classifier(folder: Path, *, labels: int = 1, padding: int | None = 0, regression: bool = False) -> Path:
    """The folder with the classifier in it."""
    config = LlamaConfig(
        vocab_size=480,
        hidden_size=HIDDEN,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,  # of 32, the smallest that vLLM's attention on the CPU takes
        num_key_value_heads=1,
        max_position_embeddings=512,
        rms_norm_eps=_EPS,
        pad_token_id=padding,
        problem_type="regression" if regression else None,
    )
    config.num_labels = labels
    model = LlamaForSequenceClassification(config)
    layer = model.model.layers[0]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.zero_()
        embeddings = model.model.embed_tokens.weight
        embeddings[:, 1] = 1.0
        embeddings[MARK, :2] = torch.tensor([1.0, 0.0])
        layer.self_attn.v_proj.weight[0, 0] = 1.0
        layer.self_attn.o_proj.weight[2, 0] = 1.0
        model.score.weight[:, 2] = _SCALE
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY_MODEL).save_pretrained(folder)
    return folder


def logit_of(ids: Sequence[int]) -> float:
    """The classifier's logit: each of the two norms divides by the root mean square of its input."""
    first = 1 / math.sqrt(1 / HIDDEN + _EPS)
    share = first * ids.count(MARK) / len(ids)
    return _SCALE * share / math.sqrt((1 + share**2) / HIDDEN + _EPS)
