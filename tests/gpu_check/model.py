"""Random models, by shape, and the prompts that the checks use."""

import random
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen2Config

SPREAD = 0.05
"""Standard deviation of the weights: answers are neither certain nor uniform, so that errors show."""


@dataclass(frozen=True)
class Shape:
    """A decoder of Qwen2's kind with tied embeddings."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int

    def write(self, folder: Path) -> Path:
        """A Hugging Face folder with random weights in bfloat16, always the same ones."""
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            intermediate_size=self.intermediate,
            tie_word_embeddings=True,
            max_position_embeddings=4096,
            initializer_range=SPREAD,
        )
        model = AutoModelForCausalLM.from_config(config)
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                torch.nn.init.normal_(parameter, 1.0, SPREAD)
        model.to(torch.bfloat16).save_pretrained(folder)
        return folder

    @property
    def parameters(self) -> int:
        """Weights that a token is multiplied by, the head included: 2 FLOP each forward, 4 backward."""
        width = self.hidden // self.heads
        attention = self.hidden * width * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.intermediate) + self.vocabulary * self.hidden


LARGE = Shape("Qwen2.5-0.5B", 24, 896, 4864, 14, 2, 151_936)
SMALL = Shape("small", 4, 128, 256, 4, 2, 1024)
SHAPES = {shape.name: shape for shape in (LARGE, SMALL)}


def reference(folder: Path, device: torch.device) -> PreTrainedModel:
    """The model of transformers in float32."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.to(device).eval()  # pyright: ignore[reportArgumentType]  # a decorated method


def prompts(shape: Shape, count: int, length: int) -> list[list[int]]:
    """Lists of random ids, always the same ones."""
    draw = random.Random(0)
    return [[draw.randrange(shape.vocabulary) for _ in range(length)] for _ in range(count)]
