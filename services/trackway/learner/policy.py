"""The policy model: loaded from a Hugging Face folder, computes logprobs, exported as such a folder.

A batch is computed as one packed row, or as rows padded on the right: the model is causal, so padding can never reach
an earlier position, and no attention mask is passed, which keeps attention on the kernel that skips the upper triangle.
Vocabulary logits are computed only where the response mask is set, and large ones in chunks of tokens
(passes/head.py). Parameters are float32 masters, float64 or bfloat16; "bfloat16" means autocast around the forward.
"""

import copy
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.utils.logging import disable_progress_bar

from trackway.learner.algorithm import check_known
from trackway.learner.batch import TrainingBatch
from trackway.learner.config import LoraSettings, PolicySettings
from trackway.learner.finite import not_finite, require_finite, require_none
from trackway.learner.head import (
    HeadChunks,
    Measure,
    RefInputs,
    TokenLogits,
    TopTokens,
    head_logits,
    in_head,
    measure_in_chunks,
    to_float32_head,
    token_logprobs,
)
from trackway.learner.loss import at_mask
from trackway.learner.packing import ATTENTION, PackedRow, SequenceLengths, can_pack
from trackway.learner.ranks.balance import PassLimit, rounds_of
from trackway.learner.ranks.messages import NOTHING
from trackway.learner.ranks.publication import export_shares
from trackway.learner.ranks.sequence_parallel import require_divisible
from trackway.learner.ranks.sharding import ALONE, Ranks, gathered, local, reshard, shard
from trackway.learner.weight_proof import LONGEST, ScoredSequence, rounded
from trackway.learner.weights.adapter import Adapter, base_names
from trackway.learner.weights.loading import ShareLoader, load_model
from trackway.learner.weights.offload import CpuOffload
from trackway.learner.weights.peft_folder import WEIGHTS, AdapterConfig, folder_names, layers_of, write_config
from trackway.learner.weights.sharded_files import read_shards, saved_tensors
from trackway.run_config.policy import ShardingConfig

MASTER_DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.float32}
"""Compute dtype by name -> dtype of all logprobs and, unless they are bfloat16, of the weights and their moments."""
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
MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]


def model_folder(path: str) -> Path:
    """A local folder as it is, any other name as a Hugging Face id (downloaded once, then from its cache)."""
    folder = Path(path)
    return folder if folder.is_dir() else Path(snapshot_download(path, allow_patterns=MODEL_FILES))


class MicroBatch(NamedTuple):
    """Rows that one rank computes in one pass."""

    rows: Tensor
    """[b] int64: places of its rows in the batch."""
    batch: TrainingBatch
    """The rows themselves."""
    counts: bool
    """False where this rank has no rows: it computes a row of another rank along with it, and drops the result."""
    reports: bool
    """Whether the results are taken from this rank: of ranks that compute the same rows, from the first."""


class ModelInputs(NamedTuple):
    """Inputs of the model from a batch, as one packed row or as padded rows."""

    keywords: Mapping[str, Tensor | SequenceLengths]
    where: Tensor
    """[b, t] bool: the N positions of its tokens that predict one of the model's own."""
    targets: Tensor
    """[N] or [N, K] int64: those predicted tokens."""
    lengths: SequenceLengths | None = None
    """None for padded rows."""
    whole: Tensor | None = None
    """[1, S] bool: `where` of the whole packed row, of which this rank has a share."""


class Policy:
    """A causal language model with what a learner needs of it: logprobs, state, export.

    An offloaded model is on the device only inside `cpu_offload.on_device()`. Among several ranks every method except
    `token_values` and `ref_inputs` is a collective with the same result on each rank. `exchange_head` replaces the head
    of the folder's model.
    """

    def __init__(
        self,
        settings: PolicySettings,
        ranks: Ranks = ALONE,
        exchange_head: Callable[[PreTrainedModel, Path], None] | None = None,
    ) -> None:
        sharding: ShardingConfig = settings.sharding
        lora = settings.lora
        self.settings = settings
        disable_progress_bar()  # or transformers draws one at every publication
        self.folder = model_folder(settings.path)
        self.dtype = settings.dtype
        check_known("dtype", self.dtype, MASTER_DTYPES)
        self.master_dtype = MASTER_DTYPES[self.dtype]
        self.device = torch.device(settings.device)
        self.ranks = ranks
        self.adapter: Adapter | None = None
        """Adapter that is trained instead of the model's own weights."""
        self.weights_dtype = torch.bfloat16 if sharding.is_bfloat16 else self.master_dtype
        positions = settings.max_positions
        shares = None if ranks.mesh is None else ShareLoader(self.folder, self.weights_dtype, ranks, positions)
        if shares is None:
            self.model = load_model(
                self.folder, self.weights_dtype, needs_head=exchange_head is None, max_positions=positions
            )
        else:
            self.model = shares.model
        if exchange_head is not None:
            exchange_head(self.model, self.folder)
        if settings.float32_head and self.dtype == "bfloat16":
            to_float32_head(self.model)
        if shares is None:
            require_finite(self.tensors())
        self.model.requires_grad_(not settings.is_frozen)
        if lora is not None:
            self.add_adapter(lora)
        self.model.train(settings.gradient_checkpointing)
        if settings.gradient_checkpointing:
            self.model.activation_checkpointing_enable({"use_reentrant": False})
        self.packs = settings.remove_padding and can_pack(self.model)
        if can_pack(self.model):
            self.model.set_attn_implementation(ATTENTION)
        if ranks.sequences is not None:
            require_divisible(self.model, ranks.sequences.size, packs=self.packs)
        self.chunks = HeadChunks.of(self.model, settings.head_in_chunks, settings.head_chunk_size)
        self._writes_whole = True
        """No rank can write a share of the weights as transformers does."""
        offload = sharding.param_offload or sharding.offload_policy
        if ranks.mesh is not None and shares is not None:
            shard(
                self.model,
                ranks.mesh,
                reshard_after_forward=sharding.reshard_after_forward,
                forward_prefetch=sharding.forward_prefetch,
                offload=offload,
                gather_dtype=torch.bfloat16 if sharding.is_gathered_in_bfloat16 and self.dtype == "bfloat16" else None,
            )
            shares.load(torch.device("cpu") if offload else self.device)
            self._writes_whole = shares.writes_whole
        self.is_offloaded_by_fsdp = offload and ranks.mesh is not None
        """The weights, and so the moments of their optimizer, stay in main memory."""
        offload = offload and not self.is_offloaded_by_fsdp
        self.cpu_offload = CpuOffload(self._memory, self.device, offload=offload, frozen=settings.is_frozen)
        if not offload:
            with self.cpu_offload.on_device():
                pass  # the weights stay there from now on

    def add_adapter(self, lora: LoraSettings) -> Adapter:
        """Attach a new adapter in place of the attached one."""
        if self.adapter is not None:
            self.adapter.detach()
        start = None if lora.adapter_path is None else model_folder(lora.adapter_path)
        self.adapter = Adapter(self.model, lora, start)
        for parameter in self.model.parameters():  # PEFT makes float32 ones, and FSDP2 needs one type
            if parameter.requires_grad:
                parameter.data = parameter.data.to(self.weights_dtype)
        self.model.train(self.settings.gradient_checkpointing)
        return self.adapter

    def attach(self, adapter: Adapter | None) -> None:
        """Exchange the attached adapter for another one of this model, or for none."""
        if adapter is self.adapter:
            return
        if self.adapter is not None:
            self.adapter.detach()
        if adapter is not None:
            adapter.attach()
        self.adapter = adapter

    def token_values(
        self, batch: TrainingBatch, temperature: float, *measures: Measure, ref: RefInputs | None = None
    ) -> list[Tensor]:
        """[N] each, in the master dtype: what the measures make of logits / temperature at the response mask.

        The N positions are in the order of the rows. `ref` is a reference's, of the same batch at the same temperature.
        """
        given, top, sequences = self.model_inputs(batch), batch.top_tokens, self.ranks.sequences
        if top is not None and sequences is not None and given.whole is not None:
            top = TopTokens(*(sequences.share_of(values, given.whole) for values in top))
        values = self._values(given, temperature, measures, ref, top)
        if given.lengths is not None:
            given.lengths.check_seen(self.model)
        if sequences is None or given.whole is None:
            return values
        return sequences.gathered(values, given.where, given.whole)

    def ref_inputs(self, batch: TrainingBatch, temperature: float) -> RefInputs:
        """Inputs of this model's head, as a reference. Without a gradient."""
        given = self.model_inputs(batch)
        with torch.no_grad():
            if not self.chunks.are_possible:
                return RefInputs(self._tempered(self._logits(given), temperature), lambda values: values)
            hidden = self._run(lambda states: states[given.where].unsqueeze(0), given)

        def logits(part: Tensor) -> Tensor:
            with torch.no_grad(), self._autocast():
                return self._tempered(head_logits(self.model, part), temperature)

        return RefInputs(hidden, logits)

    def model_inputs(self, batch: TrainingBatch) -> ModelInputs:
        """Inputs of this rank's model from a batch."""
        if not self.packs:
            targets = batch.target_ids[batch.response_mask]
            return ModelInputs({"input_ids": batch.input_ids[:, :-1]}, batch.response_mask, targets)
        row = PackedRow.of(batch)
        whole = row.response_mask
        if self.ranks.sequences is not None:
            row = row.share(self.ranks.sequences)
        keywords = {"input_ids": row.input_ids, "position_ids": row.position_ids, "sequence_lengths": row.lengths}
        return ModelInputs(keywords, row.response_mask, row.target_ids[row.response_mask], row.lengths, whole)

    def _values(
        self,
        given: ModelInputs,
        temperature: float,
        measures: Sequence[Measure],
        ref: RefInputs | None = None,
        top: TopTokens | None = None,
        *,
        autocast: bool = True,
    ) -> list[Tensor]:
        """[N] each: what the measures make of logits / temperature."""
        if not self.chunks.splits(len(given.targets)):
            logits = self._tempered(self._logits(given, autocast=autocast), temperature)
            ref_logits = None if ref is None else ref.logits(ref.values)
            return [measure(TokenLogits(logits, given.targets, ref_logits, top)) for measure in measures]

        def logits_of(hidden: Tensor) -> Tensor:
            return self._tempered(head_logits(self.model, hidden), temperature)

        def head(hidden: Tensor) -> Tensor:
            picked = hidden[given.where]
            measured = measure_in_chunks(logits_of, picked, given.targets, measures, self.chunks.size, ref, top)
            return measured.unsqueeze(0)

        return list(self._run(head, given, autocast=autocast).unbind(-1))

    def micro_batches(self, batch: TrainingBatch, limit: PassLimit) -> Iterator[MicroBatch]:
        """The micro-batches of this rank. Each rank has the same number of them. `limit` is for one rank."""
        if limit.tokens is not None and self.ranks.sequences is not None:
            limit = limit._replace(tokens=limit.tokens * self.ranks.sequences.size)
        rounds = rounds_of(batch.lengths.tolist(), limit, self.ranks.row_groups, has_padding=not self.packs)
        for micro_batches in rounds:
            own = micro_batches[self.ranks.row_group]
            rows = torch.tensor(own or [int(batch.lengths.argmin())])
            yield MicroBatch(rows, batch.rows(rows), bool(own), bool(own) and self.ranks.reports)

    def logprobs(self, batch: TrainingBatch, temperature: float, limit: PassLimit) -> Tensor:
        """[B, T - 1] on the CPU, zeros outside the response mask, without a gradient."""
        return self.measured(batch, temperature, limit, token_logprobs)[0]

    def measured(
        self,
        batch: TrainingBatch,
        temperature: float,
        limit: PassLimit,
        *measures: Measure,
    ) -> list[Tensor]:
        """Results of each measure of the logits, from one pass: as `logprobs` each."""
        results = [torch.zeros_like(batch.old_logprobs) for _ in measures]
        with self.inference():
            for rows, micro, _, reports in self.micro_batches(batch, limit):
                measured = self.token_values(micro.to(self.device), temperature, *measures)
                for result, values in zip(results, measured, strict=True):
                    if reports:
                        result[rows, : micro.response_mask.shape[1]] = at_mask(micro.response_mask, values.cpu())
        return [self.ranks.summed(result) for result in results]

    @contextmanager
    def inference(self) -> Iterator[None]:
        """A context for forward passes without a gradient."""
        with torch.no_grad(), self.cpu_offload.on_device():
            try:
                yield
            finally:
                reshard(self.model)

    @property
    def published_dtype(self) -> torch.dtype:
        """The dtype of the weights that `export` writes."""
        return torch.bfloat16 if self.dtype == "bfloat16" else self.master_dtype

    def published_logprobs(
        self, sequences: Sequence[list[int]], compute: torch.dtype = torch.float32
    ) -> list[ScoredSequence]:
        """Logprobs of each sequence's tokens 1..n-1, each given those before it, at temperature 1.

        The weights are rounded to the published dtype, and computed with in `compute`.
        """
        with self.inference(), self._merged(), rounded(self.model, self.published_dtype, compute):
            scored = [self._logprobs(group, autocast=False) for group in _groups(sequences)]
        return list(map(ScoredSequence, sequences, chain.from_iterable(scored)))

    def base_logprobs(self, token_ids: list[int]) -> list[float]:
        """Logprobs of a sequence under the model without its adapter, computed in the dtype of logprobs."""
        without = nullcontext() if self.adapter is None else self.adapter.off()
        with self.inference(), without, rounded(self.model, self.published_dtype, self.master_dtype):
            return self._logprobs([token_ids], autocast=False)[0]

    def _logprobs(self, sequences: Sequence[list[int]], *, autocast: bool = True) -> list[list[float]]:
        """Logprobs of tokens 1..n-1 of each sequence, computed as one batch."""
        lengths = [len(ids) - 1 for ids in sequences]
        ids = pad_sequence([torch.tensor(ids) for ids in sequences], batch_first=True).to(self.device)
        scored = torch.arange(max(lengths), device=self.device) < torch.tensor(lengths, device=self.device)[:, None]
        given = ModelInputs({"input_ids": ids[:, :-1]}, scored, ids[:, 1:][scored])
        (logp,) = self._values(given, 1.0, [token_logprobs], autocast=autocast)
        return [part.tolist() for part in logp.split(lengths)]

    def _logits(self, given: ModelInputs, *, autocast: bool = True) -> Tensor:
        """[N, V]: the logits, whole."""
        return self._run(
            lambda hidden: head_logits(self.model, hidden[given.where].unsqueeze(0)), given, autocast=autocast
        )

    def _run(self, head: Callable[[Tensor], Tensor], given: ModelInputs, *, autocast: bool = True) -> Tensor:
        """[N, ...]: what the model makes of what `head` computes, [1, N, ...], of its hidden states [B, T, H]."""
        with self._autocast(enabled=autocast), in_head(self.model, head):
            return self.model(**given.keywords, use_cache=False).logits.squeeze(0)

    def _autocast(self, *, enabled: bool = True) -> torch.autocast:
        # Its cache would keep a bfloat16 copy of every weight, sharded or not, until the forward ends.
        return torch.autocast(
            self.device.type, torch.bfloat16, enabled=enabled and self.dtype == "bfloat16", cache_enabled=False
        )

    def _tempered(self, logits: Tensor, temperature: float) -> Tensor:
        """logits / temperature in the master dtype. No copy where it would be the same."""
        logits = logits.to(self.master_dtype)
        return logits if temperature == 1.0 else logits / temperature

    def _memory(self) -> Iterator[Tensor]:
        return chain(self.model.parameters(), self.model.buffers()) if self.ranks.mesh is None else iter(())

    def _merged(self) -> AbstractContextManager[None]:
        """A context in which the model's own weights are those that engines get."""
        return nullcontext() if self.adapter is None else self.adapter.merged()

    def tensors(self) -> dict[str, Tensor]:
        """Every weight once, by name: of tied weights only the first name. Of a sharded model, this rank's shards.

        With an adapter only its own.
        """
        reshard(self.model)
        if self.adapter is not None:
            trained = {name for name, parameter in self.model.named_parameters() if parameter.requires_grad}
            return {name: tensor for name, tensor in self.model.state_dict().items() if name in trained}
        names = {name for name, _ in self.model.named_parameters(remove_duplicate=False)}
        tied = names - {name for name, _ in self.model.named_parameters()}
        return {name: tensor for name, tensor in self.model.state_dict().items() if name not in tied}

    def load(self, stem: Path) -> None:
        """Copies saved weights, the files of `stem`, into this model.

        Raises ValueError when they belong to another model, and NotFiniteError when they are not finite.
        """
        own = self.tensors()
        if {n: of.size for n, of in saved_tensors(stem).items()} != {n: t.shape for n, t in own.items()}:
            raise ValueError(
                f"expected the weights of {self.folder.name}, got other names or shapes in {stem}; "
                "resume with the model and the LoRA keys that the run started from"
            )
        with torch.no_grad():
            saved = {name: torch.empty_like(tensor) for name, tensor in own.items()}
            read_shards(stem, saved)
            # Not a collective, so that a file that one rank does not find is an error in this rank alone.
            require_none(saved, [not_finite(tensor) for tensor in local(saved.values())])
            for name, tensor in own.items():
                tensor.copy_(saved[name])

    def export(self, folder: Path) -> None:
        """A folder that transformers and the engines load: config, safetensors, tokenizer files."""
        with self._merged():
            named = base_names(self.model.state_dict())
            state = gathered(named, self.ranks.is_first, self.published_dtype)
            if self.ranks.is_first:
                self.write_published(folder, state)

    def export_shares(self, folder: Path) -> None:
        """Export as `export` does, but each rank writes a file with its share of the weights."""
        if self._writes_whole:
            self.export(folder)
            return
        with self._merged():
            named = base_names(self.model.state_dict())
            export_shares(folder, named, self.ranks, self.published_dtype)
            self.ranks.of_each(lambda: self._write_rest(folder), NOTHING)

    def _write_rest(self, folder: Path) -> None:
        if self.ranks.is_first:
            write_config_of(self.model, folder, self.published_dtype)
            copy_tokenizer(self.folder, folder)

    def published_copy(self) -> dict[str, Tensor]:
        """The weights that `export` writes, which training does not change; only in the first rank. A collective."""
        with self._merged():
            state = gathered(base_names(self.model.state_dict()), self.ranks.is_first, self.published_dtype)
            return {name: tensor.clone() for name, tensor in state.items()}

    @contextmanager
    def published(self) -> Iterator[dict[str, Tensor]]:
        """A context with the weights that `export` writes, where and as the model has them; for an unsharded model."""
        with self._merged():
            yield base_names(self.model.state_dict())

    def write_published(self, folder: Path, state: dict[str, Tensor]) -> None:
        """Writes the folder of `export` with these weights."""
        export_model(self.model, folder, state, self.published_dtype)
        copy_tokenizer(self.folder, folder)

    def export_adapter(self, folder: Path) -> None:
        """The folder of the adapter alone, as PEFT writes it, in the dtype of the master weights.

        Raises ValueError without an adapter, and NotFiniteError when it is not finite.
        """
        if self.adapter is None:
            raise ValueError("expected a policy with an adapter, got one that is trained whole; export it whole")
        lora = self.adapter.settings
        state = gathered(self.tensors(), self.ranks.is_first)
        if self.ranks.is_first:
            require_finite(state)
            folder.mkdir(parents=True, exist_ok=True)
            save_file(folder_names(state), folder / WEIGHTS, {"format": "pt"})
            rank, alpha, base = lora.rank, lora.alpha, str(self.folder)
            write_config(
                folder,
                AdapterConfig(r=rank, lora_alpha=alpha, target_modules=layers_of(state), base_model_name_or_path=base),
            )


class BasePolicy:
    """The model of a policy without its adapter, as its reference model: there is no second copy of the weights."""

    def __init__(self, policy: Policy) -> None:
        """Raises ValueError for a policy without an adapter."""
        if policy.adapter is None:
            raise ValueError("expected a policy with an adapter, got one that is trained whole; load a second model")
        self._policy = policy
        self._adapter = policy.adapter
        self.cpu_offload = policy.cpu_offload

    def logprobs(self, batch: TrainingBatch, temperature: float, limit: PassLimit) -> Tensor:
        """Return `Policy.logprobs` without the adapter."""
        with self._adapter.off():
            return self._policy.logprobs(batch, temperature, limit)

    def ref_inputs(self, batch: TrainingBatch, temperature: float) -> RefInputs:
        """Return `Policy.ref_inputs` without the adapter, which the head never has."""
        with self._adapter.off():
            return self._policy.ref_inputs(batch, temperature)


def _groups(sequences: Sequence[list[int]]) -> Iterator[Sequence[list[int]]]:
    """Consecutive sequences of at most LONGEST tokens with their padding, which bounds the logits in memory."""
    start = 0
    for end in range(1, len(sequences) + 1):
        longest = max(map(len, sequences[start : end + 1]))
        if end == len(sequences) or longest * (end + 1 - start) > LONGEST:
            yield sequences[start:end]
            start = end


def export_model(model: PreTrainedModel, folder: Path, state: dict[str, Tensor], dtype: torch.dtype) -> None:
    """Writes config and weights, `state` in `dtype`. Large models come in shards with an index.

    `lm_head.weight` is always explicit: an engine that reloads weights by name would otherwise keep the head of the
    previous version, or miss it. transformers ties it again on loading, as the two tensors are equal.

    Raises NotFiniteError, with nothing written, when a weight is NaN or infinite in that type.
    """
    require_finite(state)
    folder.mkdir(parents=True, exist_ok=True)
    if HEAD in state:
        # A separate tensor: transformers leaves out weights that share memory.
        state[HEAD] = state[HEAD].clone()
    model.save_pretrained(folder, state_dict=state)
    write_config_of(model, folder, dtype)
    _share(folder)


def write_config_of(model: PreTrainedModel, folder: Path, dtype: torch.dtype) -> None:
    """Writes the configurations of the model, with this type of its weights, and of its generation."""
    config = copy.deepcopy(model.config)
    config.dtype = dtype
    config.architectures = [type(model).__name__.removeprefix("FSDP")]  # fully_shard changes the name of the class
    config.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)


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
