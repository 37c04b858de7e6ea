"""What the agent loop and the rollout service's OpenAI routes both do with chat text: no HTTP."""
