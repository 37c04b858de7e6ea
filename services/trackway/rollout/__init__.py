"""The rollout service: generation with logprobs and weight versions, over an engine; OpenAI's API beside it.

`service` and `app` know HTTP and weights; what a model computes is in `engines`, what OpenAI clients send in `openai`.
"""
