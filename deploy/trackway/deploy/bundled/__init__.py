"""Files that a local deployment starts from, part of every wheel: the tiny model and a Serve config without a GPU."""

from importlib import resources
from pathlib import Path

_FOLDER = Path(str(resources.files(__name__)))
TINY_MODEL = _FOLDER / "tiny"
"""Hugging Face folder of the demo's model (231,008 parameters, with its tokenizer and chat template)."""
CPU_CONFIG = _FOLDER / "cpu.yaml"
"""Ray Serve config of the five services on one machine."""
PROJECTS = _FOLDER / "projects"
"""Projects that `trackway init` writes, by name. Each is one called my-agent. `common` has the files of all."""
