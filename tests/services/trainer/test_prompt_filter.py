import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from trackway.trainer.prompt_filter import fits_within
from trackway.wire.chat import FunctionSchema, ToolSchema

TOOL = ToolSchema(function=FunctionSchema(name="calculator"))


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; a prompt is its messages, one word per tool, and one for the assistant's turn."""
    words = Tokenizer(WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    words.pre_tokenizer = WhitespaceSplit()
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}"
        "{% for message in messages %}{{ message.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]", chat_template=template)


def test_a_prompt_is_measured_as_the_agent_templates_it(tokenizer, sample):
    row = sample(1)  # "question 1"

    assert fits_within(tokenizer, [], limit=3)(row)
    assert not fits_within(tokenizer, [], limit=2)(row)


def test_tool_schemas_count(tokenizer, sample):
    assert fits_within(tokenizer, [TOOL], limit=4)(sample(1))
    assert not fits_within(tokenizer, [TOOL], limit=3)(sample(1))
