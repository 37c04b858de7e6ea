"""Base class of the configuration sections; rejects unknown keys and too large numbers. Docstrings are the help."""

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator
from pydantic_core import PydanticCustomError

Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""A signed 64-bit integer, the range of torch and the engines."""

MOST = 3.4e38
"""Largest number of float32, in which losses are computed."""


def null_is_the_default(cls: type[BaseModel], value: object, info: ValidationInfo) -> object:
    """Validate a field that verl's files may set to null. Use it as `field_validator(<names>, mode="before")`."""
    field = cls.model_fields[str(info.field_name)]
    return field.get_default(call_default_factory=True) if value is None else value


class Section(BaseModel):
    """Part of the configuration tree; immutable once validated."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*")
    @classmethod
    def _within_float32(cls, value: object) -> object:
        if isinstance(value, float) and abs(value) > MOST:
            got = {"most": MOST, "value": value}
            raise PydanticCustomError(
                "float32", "Input should be a number of float32, at most {most}, got {value}", got
            )
        return value

    def with_values(self, values: Mapping[str, object]) -> Self:
        """A copy with other values by dotted key. They are not validated: each must fit its field."""
        changed = self
        for key, value in values.items():
            name, _, rest = key.partition(".")
            inner = getattr(changed, name).with_values({rest: value}) if rest else value
            changed = changed.model_copy(update={name: inner})
        return changed
