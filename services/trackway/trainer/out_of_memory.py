"""The keys that help a learner whose GPU has too little memory."""

ADVICE = (
    "The learner takes less memory of each GPU with more trackway.learner_ranks, with actor.fsdp_config.param_offload "
    "and optimizer_offload, and with a smaller ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu. Engines that "
    "share the GPU leave it more with a lower rollout.gpu_memory_utilization."
)


def with_advice(error: Exception) -> None:
    """End the traceback of PyTorch's OutOfMemoryError with the keys that help."""
    if type(error).__name__ == "OutOfMemoryError":  # the process of a run imports torch late
        error.add_note(ADVICE)
