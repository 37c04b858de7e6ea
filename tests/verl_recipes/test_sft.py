"""verl's SFT trainer: every key is honoured, ignored with a reason, or refused, and `sft` has the same defaults."""

from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue

from trackway.run_config import compose, resolve
from trackway.run_config.compose import known_keys, leaves
from trackway.run_config.supervised import OWN, RENAMED, ROWS, spelled
from trackway.run_config.unsupported_keys import MOVED, limited, without_effect

DEFAULTS: dict[str, JsonValue] = yaml.safe_load((Path(__file__).parent / "sft_trainer.yaml").read_text())
"""Every key of verl 0.9.1's SFT trainer with its default."""
DIFFERS = {
    "data.train_files": "no files",
    "data.val_files": "no files",
    "data.enable_thinking_default": "null, as none is read",
    "trainer.project_name": "as of other runs",
    "trainer.experiment_name": "as of other runs",
    "trainer.logger": "W&B needs an account",
    "trainer.nnodes": "null, which is 1",
    "trainer.n_gpus_per_node": "null, which leaves it to the deployment",
    "model.path": "the model of the services",
    "model.use_fused_kernels": "null, which decides by the size of the logits",
    "engine.entropy_from_logits_chunk_size": "memory alone",
    "engine.use_torch_compile": "no entropy is computed",
    "optim.clip_grad": "null, which takes actor.grad_clip, the same number",
}
"""Keys whose default is another one here, and why."""


@pytest.mark.parametrize("key", DEFAULTS)
def test_a_key_with_verls_default_is_accepted_and_known(key: str):
    resolve({ROWS: "rows", key: DEFAULTS[key]})

    name = spelled(key)
    name = MOVED.get(name, name)
    assert name in known_keys() or limited(name) or without_effect(name)


def test_the_preset_has_verls_defaults():
    values = leaves(compose([], config_name="sft").model_dump(mode="json"))
    honoured = {key: spelled(key) for key in DEFAULTS if spelled(key) in values}

    assert {key for key, name in honoured.items() if values[name] != DEFAULTS[key]} == DIFFERS.keys()
    assert {*OWN, *RENAMED} <= {*DEFAULTS} and len(DEFAULTS) == 170
