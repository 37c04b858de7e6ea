"""Chat text, shared by the agent loop, the rollout service's OpenAI routes and supervised training. No HTTP."""
