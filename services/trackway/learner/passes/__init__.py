"""Measures of a model's logits in a forward pass."""
