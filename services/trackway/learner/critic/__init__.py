"""The critic of PPO: a value model, its loss, and its training beside the policy, whose learner imports it."""
