"""The base of every configuration section: unknown keys are refused, and a field's docstring is its help."""

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """Part of the configuration tree; immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
