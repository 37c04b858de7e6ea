"""A LoRA adapter beside a model's weights, and main memory for weights that are not in use."""
