"""The policy model: loaded from a Hugging Face folder, asked for logprobs, written back as such a folder.

Rows are padded on the right and the model is causal, so padding can never reach an earlier position: no attention mask
is passed, which keeps attention on the kernel that skips the upper triangle. Vocabulary logits are made only where the
response mask is set. Parameters are float32 masters (float64 if asked); "bfloat16" means autocast around the forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from trackway.trainer.algorithm import entropy_from_logits
from trackway.trainer.batch import TrainingBatch
from trackway.trainer.export import copy_tokenizer, export_model
from trackway.trainer.learner_config import MASTER_DTYPES

MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


class TokenLogprobs(NamedTuple):
    """What the policy says of the predicted tokens under the response mask; zeros elsewhere."""

    logp: Tensor
    """[B, T - 1]."""
    entropy: Tensor
    """[B, T - 1], nats, of the tempered distribution."""


def model_folder(path: str) -> Path:
    """A local folder as it is, any other name as a Hugging Face id (downloaded once, then from its cache)."""
    folder = Path(path)
    return folder if folder.is_dir() else Path(snapshot_download(path, allow_patterns=MODEL_FILES))


class Policy:
    """A causal language model with the three things a learner does with it: logprobs, state, export.

    `dtype` is a key of MASTER_DTYPES.
    """

    def __init__(
        self, path: str, dtype: str = "float32", device: str = "cpu", gradient_checkpointing: bool = False
    ) -> None:
        disable_progress_bar()  # or transformers draws one at every publication
        self.folder = model_folder(path)
        self.dtype = dtype
        self.master_dtype = MASTER_DTYPES[dtype]
        self.device = torch.device(device)
        self.model = _load_model(self.folder, self.master_dtype, self.device)
        self.model.train(gradient_checkpointing)
        if gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})

    def token_logprobs(self, batch: TrainingBatch, temperature: float, entropy_grad: bool = False) -> TokenLogprobs:
        """Logprobs and entropies of softmax(logits / temperature) at the masked positions of a batch on the device."""
        logits = self._logits(batch.input_ids[:, :-1], batch.response_mask) / temperature
        targets = batch.input_ids[:, 1:][batch.response_mask]
        logp = -torch.nn.functional.cross_entropy(logits, targets, reduction="none")
        with torch.set_grad_enabled(entropy_grad and torch.is_grad_enabled()):
            entropy = entropy_from_logits(logits)
        return TokenLogprobs(_at(batch.response_mask, logp), _at(batch.response_mask, entropy))

    def sequence_logprobs(self, token_ids: list[int]) -> list[float]:
        """Logprobs of tokens 1..n-1 of one sequence, each given those before it, at temperature 1."""
        ids = torch.tensor([token_ids], device=self.device)
        everywhere = torch.ones(1, len(token_ids) - 1, dtype=torch.bool, device=self.device)
        with torch.no_grad():
            logp = torch.log_softmax(self._logits(ids[:, :-1], everywhere), dim=-1)
        return logp.gather(-1, ids[0, 1:].unsqueeze(-1)).squeeze(-1).tolist()

    def _logits(self, input_ids: Tensor, where: Tensor) -> Tensor:
        """[N, V] in the master dtype: logits of the N positions where `where` [B, T] is True, row by row."""
        autocast = torch.autocast(self.device.type, torch.bfloat16, enabled=self.dtype == "bfloat16")
        with autocast, _head_only(self.model, where):
            logits = self.model(input_ids=input_ids, use_cache=False).logits
        return logits.squeeze(0).to(self.master_dtype)

    def tensors(self) -> dict[str, Tensor]:
        """Every weight once, by name: of tied weights, which share memory, only the first name."""
        by_memory: dict[int, str] = {}
        state = self.model.state_dict()
        for name, tensor in state.items():
            by_memory.setdefault(tensor.data_ptr(), name)
        return {name: state[name] for name in by_memory.values()}

    def save(self, file: Path) -> None:
        """The weights as one safetensors file, in the master dtype."""
        save_file({name: t.cpu().contiguous() for name, t in self.tensors().items()}, file)

    def load(self, file: Path) -> None:
        """Copies saved weights into this model. Raises ValueError when they are another model's."""
        saved, own = load_file(file), self.tensors()
        if {n: t.shape for n, t in saved.items()} != {n: t.shape for n, t in own.items()}:
            raise ValueError(
                f"expected the weights of {self.folder.name}, got other names or shapes in {file}; "
                "resume with the model that the run began with"
            )
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(saved[name])

    def export(self, folder: Path) -> None:
        """A folder that transformers and the engines load: config, safetensors, tokenizer files."""
        export_model(self.model, folder, torch.bfloat16 if self.dtype == "bfloat16" else self.master_dtype)
        copy_tokenizer(self.folder, folder)


def _load_model(folder: Path, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    config = AutoConfig.from_pretrained(folder)
    # Dropout would make the ratio to the sampler's logprobs differ from 1 under equal weights.
    for name in [key for key in config.to_dict() if key.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype)
    torch.nn.Module.to(model, device)
    return model


@contextmanager
def _head_only(model: PreTrainedModel, where: Tensor) -> Iterator[None]:
    """While open, the vocabulary head sees only the hidden states [B, T, H] at `where` [B, T], as [1, N, H]."""

    def pick(_: torch.nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
        return inputs[0][where].unsqueeze(0)

    head = model.get_output_embeddings()
    if head is None:
        raise ValueError(f"expected a causal language model with a vocabulary head, got {type(model).__name__}")
    handle = head.register_forward_pre_hook(pick)
    try:
        yield
    finally:
        handle.remove()


def _at(mask: Tensor, values: Tensor) -> Tensor:
    return torch.zeros(mask.shape, dtype=values.dtype, device=values.device).masked_scatter(mask, values)
