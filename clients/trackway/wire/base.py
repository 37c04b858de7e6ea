"""The two bases of every wire model: requests refuse unknown fields, replies ignore them.

A caller's typo must be an error; a reply from a newer service must still be readable by an older client.
"""

from pydantic import BaseModel, ConfigDict


class WireRequest(BaseModel):
    """A body that a client sends: an unknown field is refused."""

    model_config = ConfigDict(extra="forbid", populate_by_name=True, serialize_by_alias=True)


class WireReply(BaseModel):
    """A body that a service sends, or a value inside one: unknown fields are ignored."""

    model_config = ConfigDict(extra="ignore", populate_by_name=True, serialize_by_alias=True)
