"""The forecast of GPU memory for verl's example scripts, as the documentation has it."""

import pytest
from transformers import AutoConfig

from tests.verl_recipes.gpu_table import EXAMPLES, MODELS, PAGE, table, with_table
from trackway.learner.gpu_memory import ModelSize

pytestmark = pytest.mark.extended


@pytest.mark.parametrize("name", MODELS)
def test_a_model_has_the_parameters_that_its_card_gives(name: str):
    shape = {key: value for key, value in MODELS[name]["config"].items() if key != "architectures"}
    size = ModelSize.of(AutoConfig.for_model(**shape))
    counted = size.with_value_head() if "Reward" in name else size

    assert round(counted.parameters / 1e9, 1) == MODELS[name]["billions"]


def test_the_documented_table_is_what_is_forecast_now():
    page = PAGE.read_text()

    assert page == with_table(page, table())  # python -m tests.verl_recipes.gpu_table
    assert len(EXAMPLES) == 33
