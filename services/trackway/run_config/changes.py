"""Changes to a run's configuration when it is resumed: its length, and keys that do not change what is trained."""

from collections.abc import Mapping

from pydantic import JsonValue

from trackway.run_config.compose import leaves, resolve
from trackway.run_config.models import RunConfig
from trackway.wire.errors import ErrorCode, TrackwayError

_ACTOR = "actor_rollout_ref.actor"
CHANGEABLE = (
    "trainer.total_training_steps",
    *("trackway.learner_ranks", "trainer.nnodes", "trainer.n_gpus_per_node"),
    *("trackway.rank_timeout_s", "trackway.placement_timeout_s"),
    f"{_ACTOR}.ulysses_sequence_parallel_size",
    *(f"{_ACTOR}.{name}" for name in ("ppo_micro_batch_size_per_gpu", "use_dynamic_bsz", "ppo_max_token_len_per_gpu")),
    *(f"{_ACTOR}.fsdp_config.{name}" for name in ("fsdp_size", "param_offload", "optimizer_offload", "offload_policy")),
)
"""Keys that may change when a run is resumed: steps, ranks, nodes, timeouts, micro-batch sizes and CPU offload."""
RECORDED = ("trackway.ignored_keys",)
"""Keys that are filled in when a configuration is made, and that no command line sets."""


def changed(config: RunConfig, changes: Mapping[str, JsonValue]) -> RunConfig:
    """The configuration with other values of CHANGEABLE keys. Raises TrackwayError(INVALID_REQUEST) for others."""
    refused = sorted(changes.keys() - {*CHANGEABLE})
    if refused:
        raise TrackwayError(
            ErrorCode.INVALID_REQUEST,
            f"{', '.join(refused)}: expected no other value for a resumed run, which may change "
            f"{', '.join(CHANGEABLE)}; leave it out, or start a run from a checkpoint with trainer.resume_mode="
            "resume_path and trainer.resume_from_path",
        )
    return resolve({**leaves(config.model_dump(mode="json")), **changes}) if changes else config
