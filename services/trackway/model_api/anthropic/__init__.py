"""Anthropic's formats: messages, whole and streamed, and their errors."""
