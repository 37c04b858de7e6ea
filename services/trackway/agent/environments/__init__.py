"""Environments of other projects: an episode for each trajectory, with its tools, its end and its reward.

base      what a loop asks of an environment: begin, step, score, close
openenv   OpenEnv's protocol over `/ws`
nemo_gym  NeMo-Gym's resources servers
loop      the agent loop, `agent_name: environment:NAME`
"""
