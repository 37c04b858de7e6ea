"""Checks of a run's model: a local folder, or a Hugging Face Hub id that is cached or can be downloaded."""

from pathlib import Path
from typing import TYPE_CHECKING

from trackway.deploy.checks.findings import Findings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "actor_rollout_ref.model.path"


def tokenizer_here(path: str, fetch: bool, findings: Findings) -> "PreTrainedTokenizerBase | None":
    """The model's tokenizer. None, with an entry in `findings`, when this machine does not have it yet.

    With `fetch`, the tokenizer of a Hub id is downloaded, without the weights.
    """
    folder = Path(path)
    if folder.is_dir():
        lacking = [kind for kind in ("config.json", "*.safetensors") if not any(folder.glob(kind))]
        if lacking:
            findings.not_found.append(
                f"{_KEY}: expected a Hugging Face model in {path}, got a folder without {' and '.join(lacking)}; "
                "correct the path"
            )
        return _loaded(path, True, findings)
    cached = _is_cached(path)
    if cached is None:  # neither a folder nor a Hub id
        findings.not_found.append(
            f"{_KEY}: expected a model's folder or an id on the Hugging Face Hub, got {path}; correct the path"
        )
    elif not cached and not fetch:
        findings.not_checked.append(
            f"{_KEY}: {path} is not in this machine's Hugging Face cache; it is downloaded when the run starts"
        )
    else:
        return _loaded(path, cached, findings)
    return None


def _is_cached(path: str) -> bool | None:
    """Return whether the Hub's cache has the model, or None when `path` is not a valid id, which has an owner."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        is_cached = isinstance(try_to_load_from_cache(path, "config.json"), str)
        return is_cached if is_cached or "/" in path else None
    except HFValidationError:
        return None


def _loaded(path: str, here: bool, findings: Findings) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=here)
    except Exception as error:  # transformers and the Hub's client raise many types
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        findings.missing_here.append(f"{_KEY}: expected a tokenizer for {path}, could not load it: {reason}")
        return None
    if tokenizer.chat_template is None:
        findings.wrong.append(
            f"{_KEY}: expected a tokenizer with a chat template, got none in {path}; use an instruct model"
        )
        return None
    return tokenizer
