"""The section `algorithm.rollout_correction.*`: off-policy correction, its bounds, and verl's presets.

Keys, defaults and bounds are verl's (verl/trainer/config/algorithm/rollout_correction.yaml, and the parsers in
verl/trainer/ppo/rollout_corr_helper.py). Impossible combinations, which verl finds during the first step or ignores,
are refused here.
"""

import math
from typing import Literal, NamedTuple, Self

from pydantic import JsonValue, field_validator, model_validator

from trackway.run_config.section import Section

REJECTIONS = (
    *(f"{level}_k{kind}" for level in ("token", "seq_sum", "seq_mean") for kind in (1, 2, 3)),
    *("seq_max_k2", "seq_max_k3"),
)
"""Names of `rollout_rs`: k1 = -log r, k2 = (log r)^2 / 2, k3 = r - 1 - log r, by token or over a sequence's tokens."""
BOUND_KEYS = ("algorithm.rollout_correction.rollout_is_threshold", "algorithm.rollout_correction.rollout_rs_threshold")
"""Keys whose value may be `lo_hi`."""


class RatioBounds(NamedTuple):
    """Bounds of a ratio or a divergence. Without `low` there is only the upper one."""

    low: float | None
    high: float


class Rejection(NamedTuple):
    """One criterion of `rollout_rs`: what it measures and what it keeps."""

    name: str
    """One of REJECTIONS."""
    low: float | None
    """Lower bound of the measure. None for k2 and k3, which are never negative."""
    high: float
    """Upper bound of the measure. For k1 both are logarithms of the bounds that were given."""


class RolloutCorrectionConfig(Section):
    """Correction of samples that other weights, or other arithmetic, drew than the ones that are trained.

    r is the ratio of the old policy's probability of a token to the sampler's. A preset's name, or null for no
    correction, may be given in place of the keys.
    """

    rollout_is: Literal["auto", "token", "sequence"] | None = "auto"
    """Importance weights on the policy loss: r of each token, or the product of r over its sequence; null, verl's
    default, for none. `auto` is `token` where rollouts may be of older weights and no other correction is chosen, else
    none. With `bypass_mode` and `ppo_clip` they are only reported, since the clipped ratio already contains them."""
    rollout_is_threshold: float | str | None = 2.0
    """A number truncates weights from above. `lo_hi`, such as `0.5_5.0`, sets weights outside to zero (IcePop)."""
    rollout_is_batch_normalize: bool = False
    """Divide weights by their mean over the mini batch."""
    rollout_rs: str | None = None
    """Tokens or sequences to leave out of the loss: names such as `token_k1` or `seq_mean_k3`, separated by commas. A
    token must pass all of them. k1 is -log r, k2 is (log r)^2 / 2, k3 is r - 1 - log r."""
    rollout_rs_threshold: float | str | None = None
    """Bounds of `rollout_rs`: one for all names, or one for each, separated by commas. k2 and k3 take an upper bound.
    k1 takes `lo_hi`, or `hi` for `1/hi_hi`: log lo <= k1 <= log hi keeps r in [1/hi, 1/lo]."""
    bypass_mode: bool = False
    """Use the sampler's logprobs as the old ones instead of recomputing them. r is then the trained policy's."""
    loss_type: Literal["ppo_clip", "reinforce"] = "ppo_clip"
    """Policy loss in `bypass_mode`: PPO's clipped one, or -w A log p with the importance weight w."""

    @model_validator(mode="before")
    @classmethod
    def _preset(cls, value: object) -> object:
        value = "disabled" if value is None else value
        if not isinstance(value, str):
            return value
        if value not in PRESETS:
            raise ValueError(f"expected keys or one of verl's presets, {', '.join(PRESETS)}, got {value!r}")
        return {"rollout_is": None, **PRESETS[value]}

    @field_validator("rollout_is_threshold", "rollout_rs_threshold", mode="before")
    @classmethod
    def _not_a_boolean(cls, value: object) -> object:
        if isinstance(value, bool):
            raise ValueError(f"expected a number or 'lo_hi', got {str(value).lower()}")
        return value

    @model_validator(mode="after")
    def _bounds_fit(self) -> Self:
        if self.rollout_is_threshold is not None:
            _bounds("rollout_is_threshold", str(self.rollout_is_threshold))
        elif self.rollout_is is not None:
            raise ValueError("rollout_is_threshold: expected a bound for rollout_is, got null; verl's default is 2.0")
        if self.rollout_rs is not None:
            _ = self.rejections
        if self.loss_type == "reinforce" and not self.bypass_mode:
            raise ValueError("loss_type: expected ppo_clip without bypass_mode, got reinforce; set bypass_mode=true")
        return self

    @property
    def is_bounds(self) -> RatioBounds:
        """Bounds of the importance weights. A lower one means IcePop."""
        return _bounds("rollout_is_threshold", str(self.rollout_is_threshold))

    @property
    def rejections(self) -> tuple[Rejection, ...]:
        """The criteria of `rollout_rs`, each name once. Raises ValueError when names and bounds do not fit."""
        names = tuple(dict.fromkeys(_parts(self.rollout_rs)))
        unknown = [name for name in names if name not in REJECTIONS]
        if unknown or (self.rollout_rs is not None and not names):
            found = ", ".join(unknown) or repr(self.rollout_rs)
            raise ValueError(f"rollout_rs: expected names from {', '.join(REJECTIONS)}, got {found}")
        given = _parts(self.rollout_rs_threshold)
        if len(given) not in (1, len(names)) and names:
            expected = f"one bound, or one for each of the {len(names)} names of rollout_rs"
            raise ValueError(f"rollout_rs_threshold: expected {expected}, got {self.rollout_rs_threshold!r}")
        return tuple(map(_rejection, names, given * len(names) if len(given) == 1 else given))

    @property
    def weight_level(self) -> Literal["token", "sequence"] | None:
        """The level of the importance weights, or None for none, and for `auto` until `where_stale` replaces it."""
        return None if self.rollout_is == "auto" else self.rollout_is

    def where_stale(self, stale: bool) -> Self:
        """The correction of data that `stale` says may be of older weights: `auto` is replaced."""
        if self.rollout_is != "auto":
            return self
        needed = stale and self.rollout_rs is None and not self.bypass_mode
        return self.with_values({"rollout_is": "token" if needed else None})


def describe(correction: RolloutCorrectionConfig) -> str:
    """The correction in words."""
    parts: list[str] = []
    low, high = correction.is_bounds if correction.weight_level else RatioBounds(None, 0.0)
    if correction.weight_level is not None:
        bounds = f"at most {high:g}" if low is None else f"zero outside {low:g} to {high:g}"
        parts.append(f"{correction.weight_level} importance weights, {bounds}")
    if correction.rollout_rs is not None:
        parts.append(f"rejection by {correction.rollout_rs}, bounds {correction.rollout_rs_threshold}")
    if correction.bypass_mode:
        parts.append(f"{correction.loss_type} against the sampler's logprobs")
    return "; ".join(parts) or "none"


def _parts(value: float | str | None) -> list[str]:
    return [part.strip() for part in ("" if value is None else str(value)).split(",") if part.strip()]


def _bounds(key: str, text: str) -> RatioBounds:
    """The bounds that `hi` or `lo_hi` names. Raises ValueError."""
    low, separator, high = text.strip().partition("_")
    try:
        numbers = [float(part) for part in ((low, high) if separator and "_" not in high else (text.strip(),))]
    except ValueError:
        numbers = []
    if not numbers or "_" in text.replace("_", "", 1) or not all(0 < number < math.inf for number in numbers):
        raise ValueError(f"{key}: expected a positive number, or two as 'lo_hi', got {text!r}")
    if numbers[0] > numbers[-1]:
        raise ValueError(f"{key}: expected lo <= hi in 'lo_hi', got {text!r}")
    return RatioBounds(numbers[0] if len(numbers) == 2 else None, numbers[-1])


def _rejection(name: str, text: str) -> Rejection:
    low, high = _bounds("rollout_rs_threshold", text)
    if not name.endswith("k1"):
        if low is not None:
            raise ValueError(f"rollout_rs_threshold: expected one upper bound for {name}, got {text!r}")
        return Rejection(name, None, high)
    low = 1 / high if low is None else low
    if low > high:
        raise ValueError(f"rollout_rs_threshold: expected at least 1, or 'lo_hi', for {name}, got {text!r}")
    return Rejection(name, math.log(low), math.log(high))


_BYPASS: dict[str, JsonValue] = {"bypass_mode": True}
_REINFORCE: dict[str, JsonValue] = {"bypass_mode": True, "loss_type": "reinforce"}
_TOKEN: dict[str, JsonValue] = {"rollout_is": "token"}
_SEQUENCE: dict[str, JsonValue] = {"rollout_is": "sequence"}
_ICEPOP: dict[str, JsonValue] = {"rollout_is": "token", "rollout_is_threshold": "0.5_5.0"}
_GEO: dict[str, JsonValue] = {"rollout_rs": "seq_mean_k1", "rollout_rs_threshold": "0.999_1.001"}
_K3: dict[str, JsonValue] = {"rollout_rs": "seq_mean_k3", "rollout_rs_threshold": 0.01}

PRESETS: dict[str, dict[str, JsonValue]] = {
    "decoupled_token_is": _TOKEN,
    "decoupled_seq_is": _SEQUENCE,
    "decoupled_token_icepop": _ICEPOP,
    "decoupled_seq_is_rs": {**_SEQUENCE, "rollout_rs": "seq_sum_k1", "rollout_rs_threshold": "0.5_2.0"},
    "decoupled_geo_rs": _GEO,
    "decoupled_geo_rs_seq_tis": {**_GEO, **_SEQUENCE},
    "decoupled_geo_rs_token_tis": {**_GEO, **_TOKEN},
    "decoupled_k3_rs": _K3,
    "decoupled_k3_rs_seq_tis": {**_K3, **_SEQUENCE},
    "decoupled_k3_rs_token_tis": {**_K3, **_TOKEN},
    "bypass_ppo_clip": _BYPASS,
    "bypass_ppo_clip_geo_rs": {**_BYPASS, **_GEO},
    "bypass_ppo_clip_k3_rs": {**_BYPASS, **_K3},
    "bypass_pg_is": {**_REINFORCE, **_SEQUENCE},
    "bypass_pg_token_icepop": {**_REINFORCE, **_ICEPOP},
    "bypass_pg_geo_rs": {**_REINFORCE, **_GEO},
    "bypass_pg_geo_rs_seq_tis": {**_REINFORCE, **_GEO, **_SEQUENCE},
    "bypass_pg_geo_rs_token_tis": {**_REINFORCE, **_GEO, **_TOKEN},
    "disabled": {},
}
"""verl's presets, which it offers in Python only (RolloutCorrectionConfig of verl/trainer/config/algorithm.py)."""
