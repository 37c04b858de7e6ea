"""OpenAI's formats: completions, chat completions, and their errors."""
