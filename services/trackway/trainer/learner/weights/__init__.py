"""What lies beside a model's weights, and where they lie: a LoRA adapter, and main memory while they are not in use."""
