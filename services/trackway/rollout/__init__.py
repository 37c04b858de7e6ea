"""The rollout service: generation with logprobs and weight versions, with an OpenAI-compatible API.

`app` has the routes, `service` the request handling and weights, `engines` the models, `openai` the OpenAI routes.
"""
