"""OpenAI's formats: completions, chat completions, responses, and their errors."""
