"""OpenAI's completions and chat completions, with vLLM's names for what OpenAI lacks."""
