"""Sessions: an agent that only knows a base URL calls the model; its calls become a token graph and training rows.

messages    what a message means, however a client wrote it down again
graph       the recorded ids of every call, and which of them a new call continues
rows        the graph as training rows: every sampled token trains once
"""
