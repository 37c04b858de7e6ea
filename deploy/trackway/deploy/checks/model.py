"""A run's model as this machine has it: a folder, or an id on the Hugging Face Hub that is cached or can be fetched."""

from pathlib import Path
from typing import TYPE_CHECKING

from trackway.deploy.checks.findings import Findings

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_KEY = "actor_rollout_ref.model.path"


def tokenizer_here(path: str, fetch: bool, findings: Findings) -> "PreTrainedTokenizerBase | None":
    """The model's tokenizer; None when it is not on this machine, which the findings then say.

    With `fetch` the tokenizer of a Hub id is downloaded, without the weights.
    """
    folder = Path(path)
    if folder.is_dir():
        lacking = [kind for kind in ("config.json", "*.safetensors") if not any(folder.glob(kind))]
        if lacking:
            findings.missing_here.append(
                f"{_KEY}: expected a Hugging Face model in {path}, it has no {' and no '.join(lacking)}"
            )
        return _loaded(path, True, findings)
    cached = _is_cached(path)
    if cached is None:  # neither a folder nor a Hub id
        findings.missing_here.append(
            f"{_KEY}: expected a model's folder or an id on the Hugging Face Hub, got {path}; correct it"
        )
    elif not cached and not fetch:
        findings.missing_here.append(
            f"{_KEY}: {path} is neither a folder nor in this machine's Hugging Face cache; a start downloads it"
        )
    else:
        return _loaded(path, cached, findings)
    return None


def _is_cached(path: str) -> bool | None:
    """Whether the Hub's cache has the model; None when this is no id."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.utils import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(path, "config.json"), str)
    except HFValidationError:
        return None


def _loaded(path: str, here: bool, findings: Findings) -> "PreTrainedTokenizerBase | None":
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=here)
    except Exception as error:  # transformers and the Hub's client raise many kinds
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        findings.missing_here.append(f"{_KEY}: expected a tokenizer for {path}, could not load it: {reason}")
        return None
    if tokenizer.chat_template is None:
        findings.wrong.append(
            f"{_KEY}: expected a tokenizer with a chat template, that of {path} has none; take an instruct model"
        )
        return None
    return tokenizer
