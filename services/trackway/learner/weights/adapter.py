"""LoRA: low-rank matrices beside the linear layers, which alone are trained (Hu et al., 2021, arXiv 2106.09685).

An adapted layer computes W x + s B A x with s = alpha / rank. A is random and B zero at first, so that training starts
at the base model, which is also the reference model. PEFT makes the layers and names them. vLLM and
SGLang get the adapter alone, as PEFT writes it. The embedded engine, and every engine with `lora.merge`, gets the whole
weights W + s B A.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self, cast

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from trackway.learner.config import LoraSettings
from trackway.learner.finite import require_finite
from trackway.learner.ranks.sharding import reshard, shard_like, whole
from trackway.learner.weights.peft_folder import WEIGHTS, layers_of, model_names, read_config

if TYPE_CHECKING:
    from peft.tuners.lora import Linear


NAME = "default"
"""PEFT's name of an adapter."""
_BASE_LAYER, _MATRICES = ".base_layer", ".lora_"
"""Parts of PEFT's names: of the weights of an adapted layer, and of the adapter's own."""


class _Layer(NamedTuple):
    """An adapted layer and its parts. Their weights are looked up at each use, since FSDP2 exchanges them."""

    lora: "Linear"
    base: nn.Linear
    a: nn.Linear
    b: nn.Linear

    @classmethod
    def of(cls, lora: "Linear") -> Self:
        parts = (lora.base_layer, lora.lora_A[NAME], lora.lora_B[NAME])
        return cls(lora, *(cast(nn.Linear, part) for part in parts))


class Adapter:
    """The adapter of a model, whose own weights are frozen.

    A model may have several, of which one at most is attached: with it the model is as if it had no other.
    """

    def __init__(self, model: PreTrainedModel, settings: LoraSettings, start: Path | None = None) -> None:
        """Adds the adapter to the model: a new one, or PEFT's from the folder `start`.

        Raises ValueError where no module matches, or one that cannot be adapted, and for another adapter in the folder.
        """
        # Here, since only LoRA needs it and it takes half a second.
        from peft import LoraConfig, inject_adapter_in_model
        from peft.tuners.lora import Linear, LoraLayer

        targets, excluded = settings.target_modules, settings.exclude_modules
        config = LoraConfig(
            r=settings.rank,
            lora_alpha=settings.alpha,  # pyright: ignore[reportArgumentType]  # PEFT only divides it
            target_modules=targets,
            exclude_modules=excluded,
            task_type="CAUSAL_LM",
        )
        head = model.get_output_embeddings()
        # Every rank draws the same matrices, and training draws what it would without an adapter.
        with torch.random.fork_rng(devices=[]), _stand_ins(model):
            torch.manual_seed(settings.seed)
            inject_adapter_in_model(config, model)
        adapted = {name: module for name, module in model.named_modules() if isinstance(module, LoraLayer)}
        others = [name for name, layer in adapted.items() if not isinstance(layer, Linear) or layer.base_layer is head]
        if others:
            raise ValueError(
                f"expected model.target_modules to name linear layers other than the head, got {targets!r}, "
                f"which names {', '.join(others)}; name others, or take all-linear"
            )
        if head is not None:
            head.requires_grad_(settings.trains_head)
        self.settings = settings
        self._model = model
        self._layers = [_Layer.of(layer) for layer in adapted.values() if isinstance(layer, Linear)]
        self._names = [*adapted]
        if start is not None:
            _load(model, start, settings)

    def detach(self) -> None:
        """Take the adapter out of the model, which keeps its own layers."""
        for name, layer in zip(self._names, self._layers, strict=True):
            self._model.set_submodule(name, layer.base)
        del self._model.peft_config  # or PEFT takes the next adapter for a second one beside this one

    def attach(self) -> None:
        """Put the adapter back into the model, which has no other."""
        for name, layer in zip(self._names, self._layers, strict=True):
            self._model.set_submodule(name, layer.lora)
        self._model.peft_config = {}

    @contextmanager
    def off(self) -> Iterator[None]:
        """A context in which the model computes without the adapter."""
        # PEFT's own switch also clears `requires_grad`, which FSDP2 reads only when it first gathers a parameter.
        for layer in self._layers:
            layer.lora.merged_adapters.append(NAME)
        try:
            yield
        finally:
            for layer in self._layers:
                layer.lora.merged_adapters.pop()

    @contextmanager
    def merged(self) -> Iterator[None]:
        """A context in which the model's own weights include the adapter. They are exactly as before after it.

        It takes a second copy of the adapted weights. Among several ranks a collective.
        """
        originals: list[Tensor] = []
        reshard(self._model)
        try:
            with torch.no_grad():
                for layer in self._layers:
                    weight = layer.base.weight
                    update = whole(layer.b.weight) @ whole(layer.a.weight) * layer.lora.scaling[NAME]
                    originals.append(weight.detach().clone())
                    weight.add_(shard_like(update.T if layer.lora.fan_in_fan_out else update, weight))
            with self.off():
                yield
        finally:
            reshard(self._model)
            with torch.no_grad():
                for layer, original in zip(self._layers, originals, strict=False):
                    layer.base.weight.copy_(original)


@contextmanager
def _stand_ins(model: PreTrainedModel) -> Iterator[None]:
    """A context in which weights on the meta device appear to be on the CPU, with the memory of one element.

    PEFT puts an adapter on the device of the weights, and on the meta device it would lose what was drawn.
    """
    on_meta = [
        (module, name, parameter)
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
        if parameter.is_meta
    ]
    for module, name, parameter in on_meta:
        stand_in = torch.empty(1, dtype=parameter.dtype).expand(parameter.shape)
        setattr(module, name, nn.Parameter(stand_in, requires_grad=parameter.requires_grad))
    try:
        yield
    finally:
        for module, name, parameter in on_meta:
            parameter.requires_grad_(module.get_parameter(name).requires_grad)  # PEFT freezes what it adapts
            setattr(module, name, parameter)


def _load(model: PreTrainedModel, folder: Path, settings: LoraSettings) -> None:
    read_config(folder, settings.rank, settings.alpha)
    saved = model_names(load_file(folder / WEIGHTS))
    own = {name: parameter for name, parameter in model.named_parameters() if _MATRICES in name}
    if {name: tensor.shape for name, tensor in saved.items()} != {name: tensor.shape for name, tensor in own.items()}:
        missing = sorted(set(layers_of(own)) ^ set(layers_of(saved))) or ["other shapes"]
        raise ValueError(
            f"expected the adapter {folder} to adapt the layers of model.target_modules, got a difference at "
            f"{', '.join(missing[:3])}; set the keys and the model that it was made with"
        )
    require_finite(saved)
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(saved[name])


def base_names(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The model's own weights by the names that they have without an adapter."""
    return {name.replace(_BASE_LAYER, ""): tensor for name, tensor in state.items() if _MATRICES not in name}
