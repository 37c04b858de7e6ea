"""Data that crosses process boundaries: pydantic models and the error table, without logic of any service."""
