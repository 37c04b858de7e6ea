"""The rollout service: generation with logprobs and weight versions, with an OpenAI-compatible API.

`app` has its own routes, `model_routes` the model APIs, `service` the request handling, `engines` the models.
"""
