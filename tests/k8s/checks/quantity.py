"""Kubernetes' quantities: `500m`, `2Gi`, `1e3`."""

import re

_DECIMAL = {"n": 1e-9, "u": 1e-6, "m": 1e-3, "": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15, "E": 1e18}
_BINARY = {f"{letter}i": 1024.0**power for power, letter in enumerate("KMGTPE", start=1)}
_UNITS = _DECIMAL | _BINARY


def quantity(text: str | int | float) -> float:
    """The value of a quantity. Raises ValueError if it is invalid."""
    found = re.fullmatch(r"([+-]?[0-9.]+(?:[eE][+-]?[0-9]+)?)([numkKMGTPE]?i?)", str(text))
    if not found or found[2] not in _UNITS:
        raise ValueError(f"expected a quantity such as 500m or 2Gi, got {text!r}")
    return float(found[1]) * _UNITS[found[2]]
