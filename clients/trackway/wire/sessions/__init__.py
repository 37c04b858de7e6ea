"""Sessions of the agent service: an agent calls the model by a base URL, and its calls become a graph of tokens."""
