"""Which names runs and projects may have."""

import pytest
from pydantic import ValidationError

from trackway.wire.base import checked_label, checked_run_name
from trackway.wire.trainer import RunRequest


@pytest.mark.parametrize(
    "name", ["run", "qwen2.5-3b_function_rm-gsm8k-n16", "0", "a" * 128, "München", "Mu\u0308nchen", "実験-1", "हिन्दी"]
)
def test_a_run_may_have_a_name_of_any_script_that_is_one_folder(name: str) -> None:
    assert checked_run_name(name) == name
    assert RunRequest(config={}, run=name).run == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../../evil",
        "a/b",
        "a\\b",
        "a b",
        "a\n",
        "a\x00",
        "-a",
        ".a",
        "_a",
        "\u0308",
        "a\ud800",
        "a\u202e",
        "a\u2028",
        "🙂",
        "ü" * 65,
        "a" * 129,
    ],
)
def test_a_name_that_is_no_folder_is_refused_in_plain_ascii(name: str) -> None:
    with pytest.raises(ValueError, match="expected a run name of letters, digits") as caught:
        checked_run_name(name)
    assert str(caught.value).isascii() and str(caught.value).isprintable()
    with pytest.raises(ValidationError, match="expected a run name"):
        RunRequest(config={}, run=name)


@pytest.mark.parametrize("name", ["mlflow", "spool", "weights"])
def test_a_folder_that_the_outputs_have_already_is_no_run(name: str) -> None:
    with pytest.raises(ValueError, match=f"expected a run name other than mlflow, spool, weights, got '{name}'"):
        checked_run_name(name)


def test_a_refusal_of_a_name_is_short_whatever_the_name() -> None:
    with pytest.raises(ValueError) as caught:
        checked_run_name("ä" * 10**6)
    assert len(str(caught.value)) < 500 and "1000000 characters" in str(caught.value)


@pytest.mark.parametrize("label", ["gsm8k_async_rl", "me/project", "München 2", "a..b", "/Users/me/x", "実験"])
def test_a_label_may_be_of_any_script(label: str) -> None:
    assert checked_label(label) == label


@pytest.mark.parametrize(
    "label", ["", " ", " a", "a\n", "a\x1b[31m", "\ud800", "..", "../../evil", "a/..\\b", "a" * 257]
)
def test_a_label_that_cannot_be_shown_as_it_stands_is_refused(label: str) -> None:
    with pytest.raises(ValueError, match="expected a name of 1 to 256 printable characters"):
        checked_label(label)
