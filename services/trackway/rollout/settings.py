"""Settings of the rollout service."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, model_validator

from trackway.serving import ServiceSettings
from trackway.wire.weights import TransportName, UpdateMode

DEFAULT_MAX_LEN = 4096
"""Longest sequence of an engine in tokens by default."""
_OVERRIDES = ("--hf-overrides", "--json-model-override-args")
"""Arguments of vLLM and SGLang that replace keys of the model's configuration."""


class RolloutSettings(ServiceSettings):
    """Settings of a rollout replica: model, source of weights, engine and limits."""

    model_path: Path = Path("model")
    """Hugging Face folder with config, tokenizer and weights. These weights are version 0. A model for sequence
    classification is served at `/classify`, without the routes of generation."""
    model_name: str = "policy"
    """Name of the default policy, in `/v1/models` and in replies."""
    max_policies: int = Field(default=4, ge=1)
    """Policies that the replica holds at once, the default one among them. Each has an engine of its own, with weights
    and KV cache; on a shared server an adapter. Idle ones leave for others."""
    weights_url: str | None = None
    """Weight store (a folder or any fsspec URL) that this replica follows. Without one it stays at version 0."""
    weights_cache: Path | None = None
    """Folder for copies of versions that are not read in place: of an object store, and those published as deltas. By
    default a temporary one, which all replicas of this host share; up to four copies of the model lie there. A server
    at `engine_url` must be able to read it."""
    weights_transport: TransportName = "store"
    """How weights get into the engine. `ipc`: a vLLM server takes those that a run offers
    (`trackway.weights_transport=ipc`) from the learner's memory on the same GPU. It reads from the store what is not
    offered or fails, and its first version. Such a server unpickles what its clients send: only this replica may reach
    it. Experimental: no weights have come by CUDA IPC."""
    engine: Literal["torch", "vllm", "sglang"] | Annotated[str, Field(pattern=r"^[\w.]+:\w+$")] = "torch"
    """Inference engine: embedded torch, a vLLM or SGLang server of this replica, or `module:Class`, an engine of
    your own."""
    engine_options: Mapping[str, JsonValue] = Field(default_factory=dict)
    """Settings of an engine of your own, which it reads itself."""
    engine_url: str | None = None
    """URL of a running vLLM or SGLang server. Without one the replica starts its own."""
    engine_python: Path | None = None
    """Python interpreter of the environment with vLLM or SGLang, whose pinned dependencies conflict with Trackway's."""
    engine_args: list[str] = Field(default_factory=list)
    """Extra command-line arguments of the server that the replica starts."""
    tool_parser: str | None = None
    """Format of tool calls on the chat routes: `hermes`, `qwen3_coder`, `llama3_json`, `mistral` or `pythonic`. By
    default the one that the model's chat template writes, else `hermes`."""
    engine_tokenizer: bool = False
    """Start SGLang with the model's tokenizer, which `response_format` needs; it then detokenizes every token. vLLM
    always has it if the model folder does."""
    engine_start_s: float = Field(default=600.0, gt=0.0)
    """Start-up time limit of this server in seconds."""
    engine_log: Path | None = None
    """Log file of this server; by default in the temporary folder, named after the replica."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one copy of the model is spread over (vLLM, SGLang). Experimental: no engine has run on several
    GPUs."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and KV cache (vLLM, SGLang); verl's default."""
    enforce_eager: bool = False
    """Run without CUDA graphs (vLLM, SGLang): faster to start, slower to generate."""
    enable_sleep: bool = False
    """Let `/sleep` and `/wake_up` release the engine's memory for the trainer: GPU memory; of the torch engine on a CPU
    main memory, as its weights go to a file in the temporary folder. vLLM on a CPU ignores it.
    Experimental: no engine has slept on a GPU."""
    weight_digests: bool = True
    """Compare the digests of a server's parameters after each load. vLLM shows all of them on GPUs (never run
    there), only norms and embedding on a CPU, and nothing of quantised weights. It hashes 1 to 2 GB/s on each rank, and
    generates nothing meanwhile. SGLang shows which tensors kept their digests, without parts of fused parameters and
    quantised weights."""
    max_lora_rank: int = Field(default=0, ge=0)
    """Load published LoRA adapters of up to this rank by the server's own routes (vLLM, SGLang). With 0 each is merged
    into a copy of the base weights first, and the embedded engine always merges."""
    max_loras: int = Field(default=4, ge=1)
    """Adapters that a server runs requests with at a time (vLLM, SGLang). A server at `engine_url` is started with the
    same number."""
    engine_shared: bool = False
    """Share the server at `engine_url` with services of other runs, up to `max_loras` runs: load adapters alone, and
    leave its base weights, its memory and other requests as they are. Set it for every service that uses the server.
    A server that the replica starts is shared by its policies."""
    prefix_caching: bool = True
    """Reuse the KV cache of prompts with a common prefix (vLLM, SGLang; torch always does)."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """`auto` is CUDA if available. Experimental: no engine or learner has run on a GPU."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """`auto` is float32 on the CPU (bfloat16 is four times slower there) and bfloat16 on CUDA."""
    float32_head: bool = False
    """Compute logits in float32 in an engine of bfloat16 (vLLM, SGLang), as the learner with
    `trackway.float32_head`."""
    threads: int | None = Field(default=None, ge=1)
    """CPU threads of the torch engine. None chooses when the replica starts: one for a model below 2 million parameters
    and on a GPU, else all cores. Several replicas on one machine share its cores: set a number there."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Maximum requests in a batch, which is also the number of KV slots."""
    max_queue: int = Field(default=1024, ge=0)
    """Maximum requests in the queue. Beyond it requests are answered 429 `overloaded`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus response in tokens, at most the model's own limit; that limit, at most 4096, by default."""
    max_position_embeddings: int | None = Field(default=None, ge=2)
    """Longest sequence in tokens that the model is taken to read, instead of what its `config.json` says. A server at
    `engine_url` is started with the same number."""
    classify_timeout_s: float = Field(default=300.0, gt=0.0)
    """Limit in seconds of one request to `/classify`, its wait in the queue included. A slower one is answered 504."""
    weight_wait_s: float = Field(default=30.0, ge=0.0)
    """Longest wait of a request for weights that are not loaded yet; then 409 `weights_behind`."""
    weights_late_s: float = Field(default=2.0, ge=0.0)
    """A longer wait for weights is recorded as the trajectory's incident `weights_behind`."""
    update_mode: UpdateMode = "keep"
    """Requests in flight when weights change: `keep` continues with the KV cache, `wait` finishes them first,
    `abort` ends them early and the service continues them with their tokens. A run may want another mode
    (`async_training.partial_rollout`)."""
    stuck_s: float = Field(default=60.0, gt=0.0)
    """`/ready` fails when the engine has had requests for this long without progress."""
    watch_interval_s: float = Field(default=0.2, gt=0.0)
    """Seconds between polls of the weight store."""

    @property
    def config_overrides(self) -> str | None:
        """JSON of what replaces keys of the model's `config.json`, or None for nothing."""
        head = "float32" if self.float32_head and self.engine == "vllm" else None
        changed = {"max_position_embeddings": self.max_position_embeddings, "head_dtype": head}
        given = {name: value for name, value in changed.items() if value is not None}
        return json.dumps(given) if given else None

    @model_validator(mode="after")
    def _the_model_is_described_once(self) -> Self:
        own = [name for word in self.engine_args if (name := word.partition("=")[0]) in _OVERRIDES]
        if self.config_overrides is not None and own:
            raise ValueError(
                f"engine_args: expected no {own[0]} with {self.config_overrides}, which needs that argument; give the "
                "value in config.json, in a copy of the model"
            )
        return self

    @model_validator(mode="after")
    def _a_shared_server_gets_adapters_alone(self) -> Self:
        if not self.engine_shared:
            return self
        wrong = {
            f"engine={self.engine}": (self.engine not in ("vllm", "sglang"), "set vllm or sglang"),
            "max_lora_rank=0": (self.max_lora_rank == 0, "set the adapter's rank"),
            "enable_sleep=true": (self.enable_sleep, "set false: other runs need the memory"),
        }
        if got := [f"{what} ({remedy})" for what, (is_wrong, remedy) in wrong.items() if is_wrong]:
            raise ValueError(f"engine_shared: expected a vLLM or SGLang server for adapters, got {', '.join(got)}")
        return self

    @model_validator(mode="after")
    def _offers_are_for_vllm_on_one_gpu(self) -> Self:
        if self.weights_transport == "store":
            return self
        wrong = {
            f"engine={self.engine}": self.engine != "vllm",
            f"tensor_parallel_size={self.tensor_parallel_size}": self.tensor_parallel_size > 1,
            f"max_lora_rank={self.max_lora_rank}": self.max_lora_rank > 0,
            f"weights_url={self.weights_url}": self.weights_url is None or "://" in self.weights_url,
        }
        if got := [what for what, is_wrong in wrong.items() if is_wrong]:
            raise ValueError(
                f"weights_transport={self.weights_transport}: expected engine=vllm on one GPU with whole weights and a "
                f"weight store in a folder, got {', '.join(got)}; set weights_transport=store"
            )
        return self
