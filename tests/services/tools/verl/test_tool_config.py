"""verl's tool_config YAML, and classes of verl's signature."""

from pathlib import Path

import pytest
import yaml
from pydantic import JsonValue

from trackway.tools import BaseTool
from trackway.tools.builtin.gsm8k import Gsm8kTool
from trackway.tools.builtin.search import SearchTool
from trackway.tools.loading import load_tools
from trackway.tools.settings import ToolsSettings
from trackway.tools.verl import VerlTool

pytestmark = pytest.mark.anyio

PARAMETERS: dict[str, JsonValue] = {
    "type": "object",
    "properties": {
        "answer": {"type": "array", "items": {"$ref": "#/$defs/Part"}, "x-unit": "m"},
        "how": {"type": "object", "properties": {"deep": {"enum": [1, "a", None]}}},
    },
    "required": ["answer"],
    "$defs": {"Part": {"type": "string", "minLength": 2}},
}


def entry(class_name: str, name: str = "score", **config: object) -> dict[str, object]:
    function = {"name": name, "description": "d", "parameters": PARAMETERS, "strict": False}
    schema = {"type": "function", "function": function}
    return {"class_name": class_name, "config": {"type": "native", **config}, "tool_schema": schema}


def loaded(folder: Path, *entries: object, **configs: dict[str, JsonValue]) -> list[BaseTool]:
    path = folder / "tools.yaml"
    path.write_text(yaml.safe_dump({"tools": list(entries)}))
    return [tool for tool in load_tools([], [], configs, tool_config_path=path) if isinstance(tool, BaseTool)]


@pytest.mark.parametrize("class_name", ["verl.tools.gsm8k_tool.Gsm8kTool", "verl.workers.tool.gsm8k_tool.Gsm8kTool"])
async def test_verls_gsm8k_tool_is_ours_with_the_schema_of_the_file_whole(tmp_path: Path, class_name: str) -> None:
    (tool,) = loaded(tmp_path, entry(class_name))

    assert (type(tool), tool.name) == (Gsm8kTool, "score")
    assert tool.tool_schema.function.parameters == PARAMETERS


def test_verls_search_tool_is_ours_with_verls_keys(tmp_path: Path) -> None:
    verls = {"num_workers": 120, "rate_limit": 120, "timeout": 30}
    search = entry("verl.tools.search_tool.SearchTool", "search", retrieval_service_url="http://x/retrieve", **verls)
    (tool,) = loaded(tmp_path, search)

    assert (type(tool), tool.name) == (SearchTool, "search")


def test_without_a_schema_the_class_has_its_own(tmp_path: Path) -> None:
    gsm8k, named = loaded(
        tmp_path,
        {"class_name": "verl.tools.gsm8k_tool.Gsm8kTool", "config": {}},
        {"class_name": "tests.services.tools.verl_style.NamedTool"},
    )

    assert (gsm8k.name, named.name) == ("calc_gsm8k_reward", "named")


def test_our_own_class_takes_the_config_of_the_file_and_over_it_that_of_the_settings(tmp_path: Path) -> None:
    (tool,) = loaded(
        tmp_path,
        entry("tests.services.tools.faulty_tool.FaultyTool", call_timeout_s=5, depth=1),
        score={"call_timeout_s": 1},
    )

    assert tool.config == {"call_timeout_s": 1, "depth": 1}


async def test_a_folder_in_the_file_is_relative_to_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project" / "texts").mkdir(parents=True)
    (tmp_path / "project" / "texts" / "rivers.txt").write_text("The Aldra is 412 km long.")
    monkeypatch.chdir(tmp_path)
    search = {
        "class_name": "trackway.tools.builtin.search.SearchTool",
        "config": {"documents": "texts", "index": str(tmp_path / "index")},
    }

    [tool] = loaded(tmp_path / "project", search)
    await tool.start()

    result = await tool.execute("i", {"query_list": ["How long is the Aldra?"]})
    assert "412 km" in result.text
    assert [path.name for path in tmp_path.iterdir() if path.name != "project"] == ["index"]


async def test_a_verl_class_lives_as_long_as_the_trajectory(tmp_path: Path) -> None:
    (tool,) = loaded(tmp_path, entry("tests.services.tools.verl_style.ScoreTool", depth=1))
    assert isinstance(tool, VerlTool)
    await tool.create("ours", ground_truth="72")
    await tool.execute("ours", {"answer": ["ab"]})
    result = await tool.execute("ours", {"answer": ["ab"]}, hint=1)
    reward = await tool.calc_reward("ours")
    await tool.release("ours")

    told = "{'answer': ['ab']} {'create_kwargs': {'ground_truth': '72'}, 'calls': 2} {'hint': 1} {'depth': 1}"
    assert (result.text, result.reward, result.metrics) == (f"{told}\n[image]", 0.5, {"calls": 2.0})
    assert reward == 2.0
    assert tool._tool.released == ["own"]  # pyright: ignore[reportAttributeAccessIssue]


async def test_a_verl_class_that_names_its_create_kwargs_gets_them_by_name(tmp_path: Path) -> None:
    (tool,) = loaded(tmp_path, {"class_name": "tests.services.tools.verl_style.NamedTool"})
    await tool.create("ours", ground_truth="72", other=1)
    result = await tool.execute("ours", {})

    assert (result.text, result.reward, await tool.calc_reward("ours")) == ("72", 0.0, 0.0)


def test_variables_are_filled_in_as_omegaconf_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEPTH", "deep")
    (tool,) = loaded(
        tmp_path,
        entry(
            "tests.services.tools.faulty_tool.FaultyTool",
            a="${oc.env:DEPTH}/x",
            b=["${oc.env:NO_SUCH, none}"],
            c="${x}",
        ),
    )

    assert tool.config == {"a": "deep/x", "b": ["none"], "c": "${x}"}


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"class_nam": "a.B"}, "entry 2: expected keys out of class_name, config, tool_schema, mcp, got class_nam"),
        ({"config": {}}, "entry 2: expected a class_name such as 'verl.tools.gsm8k_tool.Gsm8kTool', got none"),
        ("text", "entry 2: Input should be a valid dictionary"),
        (
            {"class_name": "a.B", "tool_schema": {"function": {"description": "d"}}},
            "entry 2: tool_schema.function.name: expected this key, got none",
        ),
        (
            {"class_name": "a.B", "tool_schema": {"function": {"name": "n", "parms": {}}}},
            "tool_schema.function: expected keys out of name, description, parameters, strict, got parms",
        ),
        ({"class_name": "a.B", "config": {"type": "benchmax"}}, "config.type to be 'native' or 'mcp', got 'benchmax'"),
        ({"config": {"type": "mcp"}}, "expected a section 'mcp' for config.type 'mcp' and only for it, got type 'mcp'"),
        (
            {"class_name": "no.such.Tool"},
            r"entry 2: expected an importable class, got 'no.such.Tool' \(No module named 'no'\)",
        ),
        ({"class_name": "json.JSONDecoder"}, "entry 2: .* got one without create, execute, calc_reward, release"),
        ({"class_name": "tests.services.tools.verl_style.NoTool"}, "got one without create, calc_reward, release"),
        (
            {"class_name": "tests.services.tools.verl_style.ScoreTool"},
            "entry 2: expected a tool_schema for ScoreTool, got none",
        ),
        (
            {"class_name": "verl.tools.sandbox_fusion_tools.SandboxFusionTool"},
            "needs a service of its own; use the built-in tool `python`",
        ),
        (
            entry("tests.services.tools.faulty_tool.FaultyTool", x="${oc.env:NO_SUCH}"),
            "the environment variable NO_SUCH, got none",
        ),
        (
            entry("tests.services.tools.faulty_tool.FaultyTool", name="two words"),
            "entry 2: expected a name of 1 to 64 of",
        ),
        (entry("tests.services.tools.faulty_tool.FaultyTool"), "two named 'score': from .*entry 1 and from .*entry 2"),
    ],
)
def test_a_wrong_entry_is_named_with_its_file_and_number(tmp_path: Path, wrong: object, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message) as caught:
        loaded(tmp_path, entry("verl.tools.gsm8k_tool.Gsm8kTool"), wrong)
    assert f"{tmp_path}/tools.yaml, entry 2" in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "tool_config_path: expected a YAML file, got .*: No such file"),
        ("tools: [", "expected YAML, got: while parsing"),
        ("- class_name: a.B", "expected one key, 'tools', with a list of entries, got list"),
        ("tool: []", r"expected one key, 'tools', with a list of entries, got \['tool'\]"),
    ],
)
def test_a_file_that_is_no_tool_config_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "tools.yaml"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=message):
        load_tools([], [], {}, tool_config_path=path)


def test_a_file_alone_offers_no_built_in_tool() -> None:
    path = Path("tools.yaml")

    assert ToolsSettings().built_in(own_tools=False) == ["calculator", "calc_gsm8k_reward"]
    assert ToolsSettings(tool_config_path=path).built_in(own_tools=False) == []
    assert ToolsSettings(function_tool_path=path).built_in(own_tools=False) == []
    assert ToolsSettings(tool_config_path=path, tools=["calculator"]).built_in(own_tools=False) == ["calculator"]


async def test_a_class_that_imports_verls_base_class_runs_without_verl(tmp_path: Path) -> None:
    counting = "tests.services.tools.verl.counting_tool.CountingTool"
    (tool,) = loaded(tmp_path, {"class_name": counting, "config": {"step": 2}})

    await tool.create("a", start=5)
    result = await tool.execute("a", {})

    assert (tool.name, result.text, result.reward, result.metrics) == ("count", "7 of count", 0.5, {"count": 7.0})
    assert await tool.calc_reward("a") == 7.0
    await tool.release("a")
    with pytest.raises(KeyError):
        await tool.calc_reward("a")
