"""A language model whose head gives one number for each position: the value of what has been written up to it.

As of a policy, position t is that of the token at t + 1, so its value is known before that token is written.
"""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from trackway.learner.passes.head import head_of

WEIGHT, BIAS = "score.weight", "score.bias"
"""The head in a folder's safetensors: transformers' name in models for token classification, which verl's are."""


def exchange_head(model: PreTrainedModel, folder: Path) -> None:
    """Gives the model of a folder a head of one number, [N, H] -> [N, 1], in place of its vocabulary head.

    Without a head in the folder, as in that of a policy, it is zero: values start at 0, whatever the model, and the
    first advantages are those of the rewards to go. Raises ValueError for a head of another size.
    """
    vocabulary_head = head_of(model).get_parameter("weight")
    head = nn.Linear(vocabulary_head.shape[1], 1, dtype=vocabulary_head.dtype)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    _read(folder, dict(zip((WEIGHT, BIAS), head.parameters(), strict=True)))
    model.config.tie_word_embeddings = False
    model.set_output_embeddings(head)


def _read(folder: Path, head: dict[str, nn.Parameter]) -> None:
    """Copies the tensors that the folder's files have."""
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in head.keys() & set(file.keys()):
                saved, parameter = file.get_tensor(name), head[name]
                if saved.shape != parameter.shape:
                    raise ValueError(
                        f"critic.model.path: expected {name} of shape {list(parameter.shape)}, got {list(saved.shape)} "
                        f"in {path}; give a model with one label"
                    )
                with torch.no_grad():
                    parameter.copy_(saved)
