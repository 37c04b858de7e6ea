"""Values of verl's keys that ask for what Trackway does not have.

A run with one is refused. A dry run lists it and plans without it. A value that verl would not take either is an error
for both.
"""

from typing import NamedTuple

from pydantic import BaseModel, ConfigDict, JsonValue

from trackway.wire.errors import ErrorCode, TrackwayError


class UnsupportedKey(BaseModel):
    """A key whose value asks for what Trackway does not have."""

    model_config = ConfigDict(frozen=True)

    key: str
    expected: str
    got: str
    remedy: str

    @property
    def sentence(self) -> str:
        """The key, what was expected, what came, and what to do."""
        return f"{self.key}: expected {self.expected}, got {self.got}; {self.remedy}"

    @property
    def error(self) -> TrackwayError:
        """The refusal of a run."""
        return TrackwayError(ErrorCode.INVALID_REQUEST, self.sentence, key=self.key)


class UnsupportedError(ValueError):
    """Raised by a validator for a value, or values together, that ask for what Trackway does not have."""

    def __init__(self, unsupported: UnsupportedKey) -> None:
        super().__init__(unsupported.sentence)
        self.unsupported = unsupported


class Other(NamedTuple):
    """Values of verl's that a key does not have here, though it has others."""

    values: tuple[str, ...]
    expected: str
    remedy: str


_HALF = Other(
    ("float16", "fp16"),
    "float32 or bfloat16",
    "float16 needs scaled gradients, which the learner does not have: take bfloat16",
)
_HALF_ENGINE = Other(("float16", "fp16", "half"), "float32, bfloat16 or auto", "take the learner's, bfloat16")
_TRTLLM = Other(("trtllm",), "vllm, sglang, hf or torch", "take vllm or sglang, and its arguments")

OTHERS: dict[str, Other] = {
    "actor_rollout_ref.rollout.name": _TRTLLM,
    "reward.reward_model.rollout.name": _TRTLLM,
    "actor_rollout_ref.rollout.dtype": _HALF_ENGINE,
    "reward.reward_model.rollout.dtype": _HALF_ENGINE,
    "actor_rollout_ref.actor.fsdp_config.dtype": _HALF,
    **{
        f"{section}.{name}": _HALF
        for section in ("actor_rollout_ref.actor.fsdp_config", "actor_rollout_ref.ref.fsdp_config", "critic.fsdp")
        for name in ("model_dtype", "mixed_precision.param_dtype")
    },
    "global_profiler.tool": Other(
        ("nsys", "npu", "torch_memory", "precision_debugger"), "torch", "start the worker under that tool"
    ),
}
"""Key that has an effect -> values that verl has in addition."""


def shown(value: JsonValue) -> str:
    """A value in a message."""
    return f"[{','.join(map(str, value))}]" if isinstance(value, list) else str(value)


def other_value(key: str, value: JsonValue) -> UnsupportedKey | None:
    """The key, if it has a value of OTHERS."""
    other = OTHERS.get(key)
    if other is None or value not in other.values:
        return None
    return UnsupportedKey(key=key, expected=other.expected, got=shown(value), remedy=other.remedy)
