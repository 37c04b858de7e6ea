"""Anthropic's messages, with vLLM's names for additional fields."""
