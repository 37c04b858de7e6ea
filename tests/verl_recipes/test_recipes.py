"""verl's own configuration and example scripts: every key is known, and what is not run is refused with its reason."""

from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue
from typer.testing import CliRunner

from trackway.deploy.commands.main_ppo import app
from trackway.trainer.config import explain, no_effect, resolve
from trackway.trainer.config.compose import known_keys
from trackway.trainer.config.unsupported_keys import MOVED, limited, without_effect

HERE = Path(__file__).parent
DEFAULTS: dict[str, JsonValue] = yaml.safe_load((HERE / "ppo_trainer.yaml").read_text())
"""Every key of verl 0.9.1 with its default."""
EXAMPLES: dict[str, dict] = yaml.safe_load((HERE / "examples.yaml").read_text())
"""The arguments of verl's example scripts."""


def kinds(key: str) -> list[str]:
    """How a key is treated."""
    if key in known_keys():
        return ["honoured"]
    if key in MOVED:
        return ["moved"]
    if limited(key):
        return ["of one value"]
    return ["told"] if without_effect(key) else []


def test_every_key_of_verl_is_known_and_explained():
    found = {key: kinds(key) for key in DEFAULTS}

    assert [key for key, kind in found.items() if not kind] == []
    assert all(explain(key)[0].meaning for key in DEFAULTS)
    assert len(DEFAULTS) == 829


def test_verls_defaults_are_accepted():
    config = resolve(DEFAULTS)

    told = {key for key, _ in no_effect(config.trackway.ignored_keys)}
    leaves = [key for key, value in DEFAULTS.items() if not isinstance(value, dict)]
    assert [key for key in leaves if kinds(key) == ["told"] and key not in told] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_of_verls_is_planned_or_refused_with_its_reason(name: str, tmp_path: Path):
    words = [*EXAMPLES[name]["arguments"], "--outputs", str(tmp_path / "outputs"), "--dry-run"]

    told = CliRunner().invoke(app, words, env={"CUDA_VISIBLE_DEVICES": ""})

    refused = EXAMPLES[name].get("refused")
    if refused is None:
        assert told.exit_code == 0, told.exception or told.output
        assert "missing here" in told.output
    else:
        assert told.exit_code != 0
        assert refused in str(told.exception or told.output)
