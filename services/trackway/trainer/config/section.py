"""Base class of the configuration sections: rejects unknown keys and non-finite numbers; docstrings are the help."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A signed 64-bit integer, the range of torch and the engines."""


class Section(BaseModel):
    """Part of the configuration tree; immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    def with_values(self, values: Mapping[str, object]) -> Self:
        """A copy with other values by dotted key. They are not validated: each must fit its field."""
        changed = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            inner = getattr(changed, name).with_values({rest: value}) if rest else value
            changed = changed.model_copy(update={name: inner})
        return changed
