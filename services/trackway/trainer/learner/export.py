"""Writes the current weights as a Hugging Face folder, which is what the engines load.

`lm_head.weight` is always explicit: an engine that reloads weights by name would otherwise keep the head of the
previous version, or miss it. transformers ties it again on loading, as the two tensors are equal.
"""

import copy
import shutil
from pathlib import Path

import torch
from transformers import PreTrainedModel

from trackway.trainer.learner.finite import require_finite

HEAD = "lm_head.weight"
TOKENIZER_FILES = [
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "*.jinja",
    "additional_chat_templates",
]


def export_model(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Writes config and weights in `dtype`; large models come in shards with an index.

    Raises NotFiniteError, with nothing written, when a weight is NaN or infinite in that type.
    """
    state = {name: tensor.detach().to("cpu", dtype) for name, tensor in model.state_dict().items()}
    require_finite(state)
    folder.mkdir(parents=True, exist_ok=True)
    if HEAD in state:
        # A separate tensor: transformers leaves out weights that share memory.
        state[HEAD] = state[HEAD].clone()
    model.save_pretrained(folder, state_dict=state)
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.save_pretrained(folder)
    _share(folder)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copies the tokenizer's files unchanged, so that trainer and engines tokenize with the same bytes."""
    for pattern in TOKENIZER_FILES:
        for item in source.glob(pattern):
            if item.is_dir():
                shutil.copytree(item, folder / item.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(item, folder / item.name)


def _share(folder: Path) -> None:
    """Gives the weights the mode of config.json: safetensors writes files that only their owner can read."""
    for weights in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", weights)
