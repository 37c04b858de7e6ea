"""OpenAI's completions and chat completions, with vLLM's names for additional fields."""
