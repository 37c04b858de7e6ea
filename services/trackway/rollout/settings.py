"""Settings of the rollout service."""

from pathlib import Path
from typing import Literal

from pydantic import Field

from trackway.rollout.sim_settings import SimSettings
from trackway.serving import ServiceSettings


class RolloutSettings(ServiceSettings):
    """Which model is served, from where its weights come, and how much work one replica takes."""

    model_path: Path = Path("model")
    """Hugging Face folder: config, tokenizer, and the weights that are version 0 while nothing is published."""
    model_name: str = "policy"
    """Name in `/v1/models` and in replies."""
    weights_url: str | None = None
    """Weight store (a folder or any fsspec URL) that this replica follows; without it version 0 is served for ever."""
    weights_cache: Path | None = None
    """Where versions of a remote store are copied to; a folder of this process in the temporary one by default."""
    engine: Literal["torch", "vllm", "sglang", "sim"] = "torch"
    """Backend that generates: embedded torch, a vLLM or SGLang server beside this process, or a simulation."""
    engine_url: str | None = None
    """A vLLM or SGLang server that runs already; without it the replica starts one of its own."""
    engine_python: Path | None = None
    """Interpreter of the environment that vLLM or SGLang is installed in; its pins conflict with ours."""
    engine_args: list[str] = Field(default_factory=list)
    """More command-line arguments for the server that the replica starts, as they are."""
    engine_start_s: float = Field(default=600.0, gt=0.0)
    """Longest start of that server in seconds."""
    engine_log: Path | None = None
    """Where its output goes; a file named after this replica in the temporary folder by default."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """GPUs that one copy of the model is spread over (vLLM, SGLang)."""
    gpu_memory_utilization: float = Field(default=0.5, gt=0.0, le=1.0)
    """Share of a GPU's memory for weights and KV cache (vLLM, SGLang); verl's default."""
    enforce_eager: bool = False
    """Without CUDA graphs (vLLM, SGLang): slower tokens, a faster start."""
    enable_sleep: bool = False
    """The server can give its GPU memory to the trainer: `/sleep` and `/wake_up` (vLLM, SGLang; sim pretends to)."""
    weight_digests: bool = True
    """Compare the digests of a vLLM server's parameters at each load, for which it hashes its weights (1 to 2 GB/s)."""
    prefix_caching: bool = True
    """Keep the KV of finished prompts for those that begin alike (vLLM, SGLang; torch always does)."""
    sim: SimSettings = Field(default_factory=SimSettings)
    """What the simulated engine says, and how fast."""
    device: Literal["cpu", "cuda", "auto"] = "auto"
    """`auto` takes CUDA when there is one."""
    dtype: Literal["float32", "bfloat16", "auto"] = "auto"
    """`auto` is float32 on the CPU (bfloat16 is four times slower there) and bfloat16 on CUDA."""
    threads: int = Field(default=1, ge=1)
    """Torch threads; more than the idle cores makes every step many times slower."""
    max_num_seqs: int = Field(default=64, ge=1)
    """Requests that run in one batch, which is also the number of KV slots."""
    max_queue: int = Field(default=1024, ge=0)
    """Requests that may wait beside the running ones; one more is answered 429 `overloaded`."""
    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus response in tokens; the model's own limit, at most 4096, by default."""
    weight_wait_s: float = Field(default=30.0, ge=0.0)
    """Longest wait of a request for weights that this replica does not hold yet; then 409 `weights_behind`."""
    weights_late_s: float = Field(default=2.0, ge=0.0)
    """A wait for weights beyond this is an incident of the trajectory, `weights_behind`."""
    update_mode: Literal["keep", "wait", "abort"] = "keep"
    """Requests in flight when weights change: go on with their KV cache, finish first, or are cut and continued."""
    drain_s: float = Field(default=300.0, gt=0.0)
    """With `update_mode` wait: requests that take longer to finish are cut and continued."""
    stuck_s: float = Field(default=60.0, gt=0.0)
    """`/ready` fails when the engine has had work for so long and got nothing done."""
    watch_interval_s: float = Field(default=0.2, gt=0.0)
    """Seconds between two looks at the weight store."""
