"""OpenAI's completions, chat completions and responses, with vLLM's names for additional fields."""
