"""Chat text, shared by the agent loop and the rollout service's OpenAI routes. No HTTP."""
