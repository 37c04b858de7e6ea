"""The Python environment of a vLLM or SGLang server, separate from ours because their pinned packages conflict."""

import os
import subprocess
from typing import Any

from trackway.system.user_error import UserError

SERVERS = ("vllm", "sglang")
"""Engines that run as a server process of each replica."""

_HAS = "import importlib.util, sys; sys.exit(importlib.util.find_spec(sys.argv[1]) is None)"
_ANSWER_S = 60.0


def runs_already(rollout_args: dict[str, Any]) -> bool:
    """Return whether the rollout service connects to an existing server instead of starting one."""
    return bool(_setting(rollout_args, "engine_url"))


def engine_python(rollout_args: dict[str, Any]) -> str | None:
    """The interpreter for the engine's server, from the Serve config or the environment. None when neither has it."""
    return _setting(rollout_args, "engine_python")


def check_engine_python(rollout_args: dict[str, Any]) -> None:
    """Raise UserError if the rollout service must start a server and no environment with that engine is configured."""
    engine = _setting(rollout_args, "engine")
    if engine not in SERVERS or runs_already(rollout_args):
        return
    remedy = f"install {engine} into a separate environment, and set TRACKWAY_ENGINE_PYTHON to its bin/python"
    python = engine_python(rollout_args)
    if python is None:
        raise UserError(f"rollout engine {engine}: expected an engine_python, got none; {remedy}")
    if not os.access(python, os.X_OK) or os.path.isdir(python):
        raise UserError(f"rollout engine {engine}: expected an interpreter, got engine_python {python}; {remedy}")
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    asked = subprocess.run([python, "-c", _HAS, engine], env=clean, timeout=_ANSWER_S, capture_output=True, check=False)
    if asked.returncode:
        raise UserError(f"rollout engine {engine}: expected it in the environment of {python}, got none; {remedy}")


def _setting(rollout_args: dict[str, Any], name: str) -> str | None:
    value = rollout_args.get(name) or os.environ.get(f"TRACKWAY_{name.upper()}")
    return str(value) if value else None
