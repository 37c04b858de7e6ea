"""A run's configuration: verl's vocabulary, Hydra's grammar, typed models.

compose    a command line (and a YAML file) -> RunConfig
resolve    nested keys received over the wire -> RunConfig
no_effect  accepted keys without effect, each with the reason
explain    the meaning, default and origin of a key

An unknown key is an error that names the nearest known keys. No key is silently ignored. A feature
of verl that Trackway lacks (UnsupportedKey) is refused for a run, and listed by a dry run.
"""

from trackway.run_config.compose import compose, given_to_deployment, resolve
from trackway.run_config.explain import Explanation, explain
from trackway.run_config.models import RunConfig
from trackway.run_config.unsupported_keys import UnsupportedKey, no_effect

__all__ = [
    "Explanation",
    "RunConfig",
    "UnsupportedKey",
    "compose",
    "explain",
    "given_to_deployment",
    "no_effect",
    "resolve",
]
