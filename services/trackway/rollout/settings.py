"""Settings of the rollout service."""

from pathlib import Path
from typing import Literal

from pydantic import Field

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
    engine: Literal["torch"] = "torch"
    """Backend that generates."""
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
    watch_interval_s: float = Field(default=0.2, gt=0.0)
    """Seconds between two looks at the weight store."""
