"""Features that users can choose and that never ran, and the warning when one is used."""

import logging
from enum import StrEnum
from functools import cache

logger = logging.getLogger("trackway")


class Experimental(StrEnum):
    """Reason why a feature is experimental, as its setting and guide say it."""

    GPU = "no engine or learner has run on a GPU"
    SEVERAL_GPUS = "no engine has run on several GPUs"
    SLEEP = "no engine has slept on a GPU"
    IPC = "no weights have come by CUDA IPC"
    NCCL = "no ranks have run on GPUs"
    OFFLOAD = "no weights have been offloaded from a GPU"
    WANDB = "nothing has been sent to W&B's own servers"
    DOCKER = "no container has run by docker"


@cache
def warn_experimental(feature: Experimental) -> None:
    """Log that this process uses the feature, once."""
    logger.warning("experimental: %s", feature)
