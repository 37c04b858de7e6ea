"""A learner of several processes: sharded weights, and how the processes are started, commanded and watched.

The policy, the optimizer and the learner import `sharding` and `publication`; `group` builds on the learner, and `loop`
imports it.
"""
