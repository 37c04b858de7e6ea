"""The model facts needed to check a prompt before it is sent to a server. Read without torch."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError

from trackway.wire.errors import ErrorCode, TrackwayError


class _ConfigFile(BaseModel):
    """The `config.json` keys in use. A multimodal model has them in `text_config`."""

    model_config = ConfigDict(extra="ignore")

    vocab_size: int
    max_position_embeddings: int
    eos_token_id: int | list[int] | None = None
    quantization_config: dict[str, object] | None = None


@dataclass(frozen=True)
class ModelFacts:
    """Vocabulary size, maximum sequence length, stop ids, and whether the weights are quantized."""

    vocab_size: int
    max_positions: int
    eos_token_ids: frozenset[int]
    quantized: bool = False

    @classmethod
    def read(cls, folder: Path, max_positions: int | None = None) -> Self:
        """Reads `config.json`, and `generation_config.json` for the stop ids. Raises INVALID_REQUEST on failure.

        `max_positions` replaces `max_position_embeddings`.
        """
        try:
            raw = json.loads((folder / "config.json").read_text())
            file = _ConfigFile.model_validate({**raw, **raw.get("text_config", {})})
        except (OSError, ValueError, ValidationError) as error:
            message = (
                f"expected a Hugging Face model folder, got {folder}: {error}; set model_path (TRACKWAY_MODEL_PATH)"
            )
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message) from error
        longest, quantized = max_positions or file.max_position_embeddings, file.quantization_config is not None
        return cls(file.vocab_size, longest, _eos_ids(folder, file), quantized)


def _eos_ids(folder: Path, file: _ConfigFile) -> frozenset[int]:
    path = folder / "generation_config.json"
    eos_token_id = json.loads(path.read_text()).get("eos_token_id") if path.is_file() else None
    ids = file.eos_token_id if eos_token_id is None else eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])
