"""The Reference pages: one row of each, exactly, and that nothing of this machine is in them."""

import re
from pathlib import Path

import pytest
from generators.__main__ import PAGES
from generators.cli import command_line
from generators.config_keys import configuration_keys
from generators.errors import error_codes
from generators.http_api import http_api
from generators.markdown import breakable, code, sentence, table
from generators.metrics import metrics_page
from generators.python_api import python_api
from generators.settings import settings_page
from generators.wire import wire_page

from trackway.reward import Scorer, scorer
from trackway.tools import function_tool
from trackway.wire.errors import ErrorCode


def row(page: str, *first: str) -> list[str]:
    """The cells of the only row that begins with these; names are shown as inline code without their break points."""
    plain = re.sub(r"<code>(.*?)</code>", r"`\1`", page.replace("<wbr>", ""))
    lines = [line.removeprefix("| ").removesuffix(" |").split(" | ") for line in plain.splitlines()]
    [cells] = [cells for cells in lines if cells[: len(first)] == [*first]]
    return cells


def test_a_table_keeps_a_bar_and_a_line_break_of_a_cell_within_it() -> None:
    assert table(("a", "b"), [("x | y", "1\n2")]) == "| a | b |\n| --- | --- |\n| x \\| y | 1 2 |\n"


def test_code_may_hold_a_backtick_and_a_name_breaks_only_between_its_parts() -> None:
    assert (code("a`b"), code("")) == ("`` a`b ``", "")
    assert breakable("/v1/models") == "<code>/v1/<wbr>models</code>"
    assert breakable("data.train_files") == "<code>data.<wbr>train_files</code>"
    assert breakable("TRACKWAY_AUTH__TOKENS") == "<code>TRACKWAY_AUTH__<wbr>TOKENS</code>"


def test_a_docstring_speaks_of_json_and_holds_no_html_but_code_stays_as_it_is() -> None:
    assert sentence("None takes outputs/<run>; `None` <b>") == "`null` takes outputs/&lt;run&gt;; `None` &lt;b&gt;"


def test_an_error_code_has_its_status_whether_to_retry_who_is_told_and_its_meaning() -> None:
    meaning = "The replica does not hold the requested weight version yet."
    assert row(error_codes(), "`weights_behind`") == ["`weights_behind`", "409", "yes", "no", meaning]
    assert row(error_codes(), "`tool_timeout`")[:4] == ["`tool_timeout`", "504", "no", "yes"]


@pytest.mark.parametrize("error", ErrorCode)
def test_every_error_code_has_a_row(error: ErrorCode) -> None:
    assert row(error_codes(), f"`{error.value}`")


def test_a_setting_has_its_variable_its_default_and_its_sentence() -> None:
    assert row(settings_page(), "`body_timeout_s`<br>`TRACKWAY_BODY_TIMEOUT_S`")[1:] == [
        "`60.0`",
        "Seconds for a request's body to be complete. A slower one is answered 408.",
    ]


def test_a_nested_setting_has_the_variable_that_reaches_it_and_the_default_of_its_place() -> None:
    names = "`rollout_policy.read_s`<br>`TRACKWAY_ROLLOUT_POLICY__READ_S`"
    assert row(settings_page(), names)[1:] == ["`600.0`", "Seconds to wait for the next bytes of an answer."]


def test_a_key_of_an_environment_and_of_an_mcp_server_has_its_sentence() -> None:
    meaning = "Seconds for a server's first response. Without it the tool server does not start."
    assert row(settings_page(), "`connect_timeout_s`") == ["`connect_timeout_s`", "`30.0`", meaning]
    assert row(settings_page(), "`max_open`")[1:] == ["`64`", "Episodes at once on this replica; others wait."]


def test_a_default_is_not_what_the_environment_of_the_build_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow.internal")
    assert "mlflow.internal" not in settings_page()


def test_a_configuration_key_has_its_default_and_its_sentence() -> None:
    meaning = "Prompts per step, each with `rollout.n` rollouts."
    assert row(configuration_keys(), "`data.train_batch_size`")[1:] == ["`1024`", meaning]


def test_a_key_that_decides_the_deployment_says_so() -> None:
    assert row(configuration_keys(), "`trainer.n_gpus_per_node`")[2].endswith("*(deployment)*")
    assert not row(configuration_keys(), "`trainer.save_freq`")[2].endswith("*(deployment)*")


def test_a_key_without_effect_has_its_reason_and_a_moved_one_its_new_name() -> None:
    page = configuration_keys()
    assert row(page, "`data.use_shm`")[1:] == ["rows are held in memory"]
    assert row(page, "`algorithm.use_pf_ppo`")[1] == "`False`"
    assert row(page, "`trainer.rollout_trace.backend`")[1:] == ["`actor_rollout_ref.rollout.trace.backend`"]


def test_a_metric_has_its_type_its_labels_and_its_meaning_before_it_has_a_sample() -> None:
    labels = "`method`, `route`, `status`"
    assert row(metrics_page(), "`trackway_requests_total`")[1:] == ["counter", labels, "Requests by route and status"]


def test_a_metric_of_a_run_is_there_though_no_run_is() -> None:
    meaning = "Mean accuracy of the newest validation"
    assert row(metrics_page(), "`trackway_run_accuracy`")[1:] == ["gauge", "`data_source`, `run`", meaning]


def test_a_route_has_its_models_and_the_scope_it_needs() -> None:
    assert row(http_api(), "POST", "`/abort_requests`")[2:] == [
        "Abort generations by request id, or all. Each returns its tokens so far with finish_reason `abort`. *(admin)*",
        "[AbortRequest](wire.md#abortrequest), query: `model`",
        "[AbortReply](wire.md#abortreply)",
    ]


def test_a_route_whose_parameter_has_a_converter_has_its_scope_too() -> None:
    [tools] = [part for part in http_api().split("\n## ") if part.startswith("`/tools`")]
    assert row(tools, "DELETE", "`/sessions/{session_id}`")[2].endswith("*(admin)*")


def test_a_route_that_streams_says_as_what_and_a_query_is_part_of_the_request() -> None:
    assert row(http_api(), "GET", "`/runs/{run}/metrics`")[2:] == [
        "One MetricsRow per line. With `follow`, until the run has ended.",
        "query: `follow`",
        "`application/x-ndjson`",
    ]


def test_a_field_of_a_wire_model_has_its_type_with_bounds_its_default_and_its_meaning() -> None:
    assert row(wire_page(), "`rollouts`")[1:] == [
        "list of integer (at most 1024) or null",
        "`null`",
        "Only these `rollout_n`, to complete a broken stream. `null` asks for 0..n-1.",
    ]


def test_a_command_has_its_options_with_their_variables_and_defaults() -> None:
    page = command_line()
    outputs = "`--outputs <path>`: Folder of runs, weights and logs.  [env var: TRACKWAY_UP_OUTPUTS; default: outputs]"
    assert "### `trackway scale`\n\nChange the number of replicas of a running service." in page
    assert f"* {outputs}\n" in page


def test_an_example_of_a_command_is_a_block_to_copy() -> None:
    assert "running service.\n\n```console\n$ trackway scale rollout 2\n```\n\n**Usage**" in command_line()


def test_a_page_of_the_python_api_asks_for_each_exported_name() -> None:
    summary = "::: trackway.reward\n    options:\n      members: false\n      show_root_heading: false"
    source = "Import everything on this page from `trackway.reward`."
    exported = f"::: {scorer.__module__}.scorer\n\n::: {Scorer.__module__}.Scorer"  # functions first
    assert python_api("trackway.reward", "Scorers") == f"# Scorers\n\n{summary}\n\n{source}\n\n{exported}\n"


def test_an_export_that_is_named_like_its_module_is_the_export() -> None:
    assert f"\n::: {function_tool.__module__}.function_tool\n" in python_api("trackway.tools", "Tools")


@pytest.mark.parametrize("name", PAGES)
def test_a_page_names_no_folder_of_the_machine_that_builds_it(name: str) -> None:
    page = PAGES[name]()
    assert str(Path(__file__).parents[2]) not in page
    assert f"{Path.home()}/" not in page
