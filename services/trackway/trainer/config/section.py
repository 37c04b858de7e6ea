"""Base class of the configuration sections: rejects unknown keys and non-finite numbers; docstrings are the help."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Part of the configuration tree; immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)
