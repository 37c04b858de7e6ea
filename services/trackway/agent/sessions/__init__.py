"""Sessions: an agent that only knows a base URL calls the model. Its calls become a token graph and training rows.

graph      the recorded ids of every call, and which of them a new call continues
session    one session: its calls, placed in the graph, generated under its root span
delivery   an answered call, and its response, which knows whether the client got it
store      the live sessions of a replica, with their bounds
routes     the HTTP routes
fast_path  the model calls among them, without FastAPI
loop       the agent loop of a session, whose rows become the trajectory
external   `agent_name: external`: a program or function started for each rollout
"""
