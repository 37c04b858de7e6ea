"""Sessions: an agent that only knows a base URL calls the model. Its calls become a token graph and training rows.

messages    what a message means, however a client wrote it down again
graph       the recorded ids of every call, and which of them a new call continues
rows        the graph as training rows: every sampled token trains once
session     one session: its calls, placed in the graph, generated under its root span
store       the live sessions of a replica, with their bounds
passing_on  a call that arrives at another replica
routes      the HTTP routes
loop        the agent loop of a session, whose rows become the trajectory
external    `agent_name: external`: a program or function started for each rollout
container   the command lines of such a program in a container
"""
