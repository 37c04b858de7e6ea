"""The request and reply formats of model APIs, between JSON and token ids.

`rollout` serves them for its engine, and `agent` for its sessions; no other package imports this one. A user provides
`choices.Generates`, which continues token ids, and the routes. Engines, weights and trajectories do not belong here.
"""
