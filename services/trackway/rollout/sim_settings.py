"""Settings of the simulated engine: its output, and the time it takes."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SimSettings(BaseModel):
    """Output and speed of the simulated engine."""

    model_config = ConfigDict(extra="forbid")

    vocab_size: int = Field(default=480, ge=4)
    """Vocabulary size; this default and that of `eos_token_id` are those of `examples/tiny`."""
    eos_token_id: int = Field(default=2, ge=0)
    """Last token of an answer that no limit truncates."""
    max_len: int = Field(default=4096, ge=2)
    """Longest prompt plus response in tokens, unless `max_model_len` is set."""
    response_tokens: float = Field(default=128.0, ge=1.0)
    """Mean length of an answer; each length derives from the request's seed and prompt."""
    response_spread: float = Field(default=0.5, ge=0.0, le=3.0)
    """Standard deviation of the length's logarithm (a log-normal distribution); 0 makes all answers equally long."""
    script: list[list[int]] = Field(default_factory=list)
    """Scripted answers by turn instead of random ones: a prompt that contains the first n, in order, gets the next
    (the last one repeats), so that an agent's tool calls run as scripted."""
    step_s: float = Field(default=0.01, gt=0.0)
    """Seconds per decode step with a single request."""
    step_slope_s: float = Field(default=0.0002, ge=0.0)
    """Additional seconds per step for each further request in the batch."""
    prefill_tokens_per_s: float = Field(default=20_000.0, gt=0.0)
    """Prefill speed of a single request; in a full batch it slows down as decoding does."""
    load_s: float = Field(default=0.0, ge=0.0)
    """Seconds to load a version of the weights, during which requests keep running."""
    cache_tokens: int = Field(default=1_000_000, ge=0)
    """Capacity of the prefix cache in tokens, evicted least recently used first; 0 disables it."""

    @model_validator(mode="after")
    def _ids_are_known(self) -> Self:
        largest = max([self.eos_token_id, *(token for turn in self.script for token in turn)])
        if largest >= self.vocab_size or not all(self.script):
            message = f"eos_token_id and script: expected turns of ids below {self.vocab_size}, got {largest} or no ids"
            raise ValueError(f"{message}; script the served model's own tokens")
        return self
