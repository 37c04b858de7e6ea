"""How the simulated engine behaves: lengths of its answers, and the time that they take."""

from typing import Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class SimSettings(BaseModel):
    """An engine of no model: what it says, how long that is, and how fast it comes."""

    model_config = ConfigDict(extra="forbid")

    vocab_size: int = Field(default=480, ge=4)
    """Token ids are below this; the default and that of `eos_token_id` are those of `examples/tiny`."""
    eos_token_id: int = Field(default=2, ge=0)
    """Ends an answer that is not cut by a limit."""
    max_len: int = Field(default=4096, ge=2)
    """Longest prompt plus response in tokens, unless `max_model_len` says otherwise."""
    response_tokens: float = Field(default=128.0, ge=1.0)
    """Mean length of an answer; each length follows from the request's seed and prompt."""
    response_spread: float = Field(default=0.5, ge=0.0, le=3.0)
    """Standard deviation of the length's logarithm (a log-normal distribution); 0 makes all answers equally long."""
    script: list[list[int]] = Field(default_factory=list)
    """Answers by turn instead of random ones: a prompt that contains the first n of them, in order, is given the next
    (the last one again when there is none), so that an agent's loop of tool calls runs as written."""
    step_s: float = Field(default=0.01, gt=0.0)
    """Seconds that one decode step takes for a batch of one."""
    step_slope_s: float = Field(default=0.0002, ge=0.0)
    """Seconds that each further request of the batch adds to a step."""
    prefill_tokens_per_s: float = Field(default=20_000.0, gt=0.0)
    """Speed at which a lone prompt is computed; in a full batch it is slowed down as decoding is."""
    load_s: float = Field(default=0.0, ge=0.0)
    """Seconds that loading a version of the weights takes, beside the running requests."""
    cache_tokens: int = Field(default=1_000_000, ge=0)
    """Tokens that the prefix cache holds, the least recently used leaving first; 0 is none."""

    @model_validator(mode="after")
    def _ids_are_known(self) -> Self:
        largest = max([self.eos_token_id, *(token for turn in self.script for token in turn)])
        if largest >= self.vocab_size or not all(self.script):
            message = f"eos_token_id and script: expected turns of ids below {self.vocab_size}, got {largest} or no ids"
            raise ValueError(f"{message}; script the served model's own tokens")
        return self
