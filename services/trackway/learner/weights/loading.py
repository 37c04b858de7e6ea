"""A model loaded from a Hugging Face folder: whole in one process, or of each rank its share.

A model that the ranks share need not fit into one of them. Each rank makes it without weights (its parameters are on
PyTorch's meta device, its buffers are computed), shards it, and then reads its own rows of each weight from the
safetensors files. Where files and model do not have the same names, or transformers converts weights as it loads them
(as it does for mixtures of experts), the first rank loads the whole model and sends each rank its rows.
"""

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from pydantic import TypeAdapter
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping

from trackway.learner.finite import SHOWN_TENSORS
from trackway.learner.head import head_of
from trackway.learner.ranks.messages import NOTHING, broadcast
from trackway.learner.ranks.sharding import Ranks, kept_in_float32, local, require_finite_shards, scatter_into
from trackway.learner.weights.adapter import base_names
from trackway.learner.weights.sharded_files import read_files, tensors_in
from trackway.system import indexed_files

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
GENERATION = "generation_config.json"

logger = logging.getLogger("trackway.trainer")


def load_model(
    folder: Path, dtype: torch.dtype, *, needs_head: bool = True, max_positions: int | None = None
) -> PreTrainedModel:
    """The causal language model of a folder, without dropout.

    `max_positions` replaces `max_position_embeddings` of the folder's configuration. Raises ValueError, with their
    names, for tied weights that differ, and for weights that the folder lacks; the vocabulary head's only if it
    `needs_head`.
    """
    model, lacking = _loaded(folder, dtype, max_positions)
    if not needs_head:
        head = {id(parameter) for parameter in head_of(model).parameters()}
        lacking -= {name for name, parameter in model.named_parameters() if id(parameter) in head}
    _require_none(lacking, model, folder)
    return model


class ShareLoader:
    """Loads a model of which each rank holds a share. Every method is a collective of the ranks."""

    def __init__(self, folder: Path, dtype: torch.dtype, ranks: Ranks, max_positions: int | None = None) -> None:
        self.model = _without_weights(folder, dtype, max_positions)
        """On the meta device, until `load`. What is added to it before that, elsewhere, is kept."""
        self.writes_whole = False
        """True if transformers writes the weights by other names, or several as one, so that no rank can write its own.
        Known after `load`."""
        self._folder = folder
        self._max_positions = max_positions
        self._dtype = dtype
        self._ranks = ranks
        self._class = type(self.model).__name__
        self._converts = bool(get_model_conversion_mapping(self.model, add_legacy=False))

    def load(self, device: torch.device) -> None:
        """Loads the shares of the sharded model to this device.

        Raises ValueError for weights that the folder lacks, or that have other shapes there, and NotFiniteError.
        """
        model = self.model
        names = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        model._apply(lambda tensor: torch.empty_like(tensor, device=device) if tensor.is_meta else tensor)
        state = model.state_dict()
        weights = base_names({name: state[name] for name in names})
        files = [] if self._converts else _files(self._folder)
        if all(
            self._ranks.of_each(lambda: bool(files) and weights.keys() <= tensors_in(files).keys(), TypeAdapter(bool))
        ):
            self._read(files, weights)
        else:
            self._receive(weights)
        require_finite_shards(weights, self._ranks)

    def _saved_buffers(self) -> dict[str, Tensor]:
        saved = self.model.state_dict().keys()
        return {name: buffer for name, buffer in self.model.named_buffers() if name in saved}

    def _read(self, files: Sequence[Path], weights: Mapping[str, Tensor]) -> None:
        """Reads this rank's rows of each weight."""
        saved, model = tensors_in(files), self.model
        targets = {name: t for name, t in {**weights, **self._saved_buffers()}.items() if name in saved}
        other = [name for name, target in targets.items() if saved[name].size != target.shape]
        if other:
            raise ValueError(
                f"expected the weights of {self._class} in {self._folder}, got other shapes of {_listed(other)}; "
                "give the config.json of this model"
            )
        unexpected = saved.keys() - targets.keys() - model.all_tied_weights_keys.keys() - model.state_dict().keys()
        if unexpected and self._ranks.is_first:
            logger.warning("%s has weights that %s does not: %s", self._folder, self._class, _listed(unexpected))
        self._ranks.of_each(lambda: read_files(files, targets), NOTHING)
        for name, source in model.all_tied_weights_keys.items():
            if name in saved and name not in targets and source in targets:
                self._require_tied(files, name, source, targets[source])

    def _require_tied(self, files: Sequence[Path], name: str, source: str, weight: Tensor) -> None:
        """Raises ValueError unless both names have the same weight in the files."""
        other = torch.empty_like(weight)
        self._ranks.of_each(lambda: read_files(files, {name: other}), NOTHING)
        ours, theirs = local([weight, other])
        if self._ranks.summed(torch.tensor(int(not torch.equal(ours, theirs)))):
            raise _not_tied(name, source, self._folder)

    def _receive(self, weights: Mapping[str, Tensor]) -> None:
        """Receives this rank's rows of each weight from the first rank, which loads the model whole."""
        model: PreTrainedModel | None = None
        failure: Exception | None = None
        if self._ranks.is_first:
            try:
                model, lacking = _loaded(self._folder, self._dtype, self._max_positions)
                _require_none(lacking & weights.keys(), model, self._folder)
            except (OSError, ValueError, RuntimeError, SafetensorError) as error:
                failure = error
        conversions = getattr(model, "_weight_conversions", None)
        own = ("" if failure is None else str(failure) or type(failure).__name__, bool(conversions))
        error, self.writes_whole = broadcast(TypeAdapter(tuple[str, bool]), own)
        if error:
            raise ValueError(error) from failure
        vars(self.model)["_weight_conversions"] = conversions  # with which transformers writes the weights
        whole = {} if model is None else model.state_dict()
        for name, target in {**weights, **self._saved_buffers()}.items():
            scatter_into(target, whole.get(name), self._ranks)


def _not_tied(name: str, source: str, folder: Path) -> ValueError:
    return ValueError(
        f"expected {name} and {source} in {folder} to be equal, as its config.json ties them, got two weights; set "
        "tie_word_embeddings to false there"
    )


def _config(folder: Path, max_positions: int | None) -> PreTrainedConfig:
    config = AutoConfig.from_pretrained(folder)
    if max_positions is not None:
        config.get_text_config().max_position_embeddings = max_positions
    # Dropout would make the ratio to the sampler's logprobs differ from 1 under equal weights.
    for name in [key for key in config.to_dict() if key.endswith(("dropout", "pdrop"))]:
        setattr(config, name, 0.0)
    return config


def _loaded(folder: Path, dtype: torch.dtype, max_positions: int | None = None) -> tuple[PreTrainedModel, set[str]]:
    """The model, and the names of the parameters that the folder lacks. Raises ValueError for tied ones that differ."""
    config = _config(folder, max_positions)
    indexed_files(folder)  # transformers reads what they name
    loaded = AutoModelForCausalLM.from_pretrained(folder, config=config, dtype=dtype, output_loading_info=True)
    model, report = cast(tuple[PreTrainedModel, dict[str, set[str]]], loaded)
    # transformers takes away the pairs that differ.
    tied = model.get_expanded_tied_weights_keys(all_submodels=False)
    differing = sorted(tied.keys() - model.all_tied_weights_keys.keys())
    if differing:
        raise _not_tied(differing[0], tied[differing[0]], folder)
    return model, report["missing_keys"] & {name for name, _ in model.named_parameters()}


def _without_weights(folder: Path, dtype: torch.dtype, max_positions: int | None) -> PreTrainedModel:
    """The model with its parameters on the meta device."""
    with _parameters_on_meta():
        model = AutoModelForCausalLM.from_config(_config(folder, max_positions), dtype=dtype)
    if dtype == torch.bfloat16:
        _keep_in_float32(model)
    if model.can_generate() and (folder / GENERATION).exists():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return model.eval()


def _keep_in_float32(model: PreTrainedModel) -> None:
    """Makes the buffers float32 that the class of a bfloat16 model keeps so. Raises ValueError for such parameters."""
    for _, buffer in kept_in_float32(model, model.named_buffers()):
        buffer.data = buffer.data.float()
    kept = [name for name, _ in kept_in_float32(model, model.named_parameters())]
    if kept:
        raise ValueError(
            f"expected fsdp_config.model_dtype=fp32 for several ranks of {type(model).__name__}, which keeps {kept[0]} "
            "in float32, got bf16; FSDP2 cannot train weights of both types, set it to fp32"
        )


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """A context in which modules are made with their parameters on the meta device. Buffers are computed as always:
    those that no file has, such as the frequencies of rotary embeddings, could not be restored."""
    register = nn.Module.register_parameter

    def register_on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and not param.is_meta:
            param = nn.Parameter(param.to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_on_meta
    try:
        yield
    finally:
        nn.Module.register_parameter = register


def _files(folder: Path) -> list[Path]:
    """The safetensors files of a folder; none without them."""
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    return indexed_files(folder, INDEX)


def _require_none(lacking: Collection[str], model: PreTrainedModel, folder: Path) -> None:
    if lacking:
        raise ValueError(
            f"expected the weights of {type(model).__name__} in {folder}, got none for {_listed(lacking)}; give the "
            "folder of the whole model"
        )


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - SHOWN_TENSORS} more" if len(names) > SHOWN_TENSORS else ""
    return f"{', '.join(sorted(names)[:SHOWN_TENSORS])}{more}"
