import sys
from pathlib import Path

import pytest

from tests.services.tools.faulty_tool import FaultyTool
from trackway.tools.base import BaseTool, ToolLimits
from trackway.tools.builtin.calculator import CalculatorTool
from trackway.tools.core.server import ToolRegistry
from trackway.tools.loading import load_tools, tools_of
from trackway.tools.settings import ToolsSettings
from trackway.wire.errors import ErrorCode, TrackwayError

FAULTY = "tests.services.tools.faulty_tool:FaultyTool"


def test_tools_are_loaded_by_name_and_by_import_path_with_their_config() -> None:
    paths = [FAULTY, "tests.services.tools.travel_functions:plan"]
    loaded = load_tools(["calculator"], paths, {"faulty": {"call_timeout_s": 1.5}, "plan": {"call_timeout_s": 2}})

    tools = [tool for tool in loaded if isinstance(tool, BaseTool)]
    assert [type(tool).__name__ for tool in tools] == ["CalculatorTool", "FaultyTool", "FunctionTool"]
    assert [tool.config for tool in tools] == [{}, {"call_timeout_s": 1.5}, {"call_timeout_s": 2}]


@pytest.mark.parametrize(
    ("names", "paths", "configs", "error", "message"),
    [
        (["abacus"], [], {}, ValueError, "got 'abacus'; name others in extra_tools"),
        ([], ["json:JSONDecoder"], {}, TypeError, "a subclass of trackway.tools.base.BaseTool"),
        ([], ["trackway.tools.base:BaseTool"], {}, TypeError, "BaseTool.default_schema to be a ToolSchema"),
        (["calculator"], [], {"faulty": {}}, ValueError, r"tool_config for loaded tools only, got \['faulty'\]"),
    ],
)
def test_a_wrong_setting_is_refused(
    names: list[str], paths: list[str], configs: dict[str, dict[str, float]], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        load_tools(names, paths, {name: {**config} for name, config in configs.items()})


def test_two_tools_of_one_name_are_refused_by_where_both_come_from(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from trackway.tools import function_tool\n@function_tool\ndef faulty(mode: str) -> str: ...\n"
    )
    sources = rf"from setting extra_tools, '{FAULTY}' and from function_tool_path .*mine\.py"
    with pytest.raises(ValueError, match=rf"two named 'faulty': {sources}; rename one"):
        load_tools([], [FAULTY], {}, function_tool_path=tmp_path / "mine.py")


def test_an_unknown_tool_is_told_with_the_known_ones() -> None:
    registry = ToolRegistry([CalculatorTool.default(), FaultyTool.default()])

    with pytest.raises(TrackwayError, match=r"one of the tools calculator, faulty, got 'abacus'") as caught:
        registry.get("abacus")
    assert caught.value.code is ErrorCode.UNKNOWN_TOOL
    assert caught.value.detail == {"known": ["calculator", "faulty"]}


def test_a_config_lowers_the_servers_limits_and_never_raises_them() -> None:
    limits = ToolLimits(call_timeout_s=30, max_output_chars=100)

    narrowed = limits.narrowed({"call_timeout_s": 5, "max_output_chars": 1000, "url": "http://sandbox"})

    assert narrowed == ToolLimits(call_timeout_s=5, max_output_chars=100)


def test_a_tool_without_execute_cannot_be_made() -> None:
    class Empty(BaseTool):
        default_schema = CalculatorTool.default_schema

    with pytest.raises(TypeError, match="abstract"):
        Empty.default()


def test_function_tools_of_a_module_are_offered_alone_or_beside_named_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "own_tools"
    package.mkdir()
    (package / "__init__.py").write_text("import own_tools.words")
    (package / "words.py").write_text(
        "from trackway.tools import function_tool\n@function_tool\ndef shout(text: str) -> str: return text\n"
    )
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = ToolsSettings(modules=["own_tools"], code_path=tmp_path)
    both = ToolsSettings(modules=["own_tools"], code_path=tmp_path, tools=["calculator"])

    loaded = [[tool.name for tool in tools_of(settings) if isinstance(tool, BaseTool)] for settings in (own, both)]

    assert loaded == [["shout"], ["calculator", "shout"]]


CLASS = """
from trackway.tools.builtin.calculator import CalculatorTool

class Mine(CalculatorTool):
    pass

class Abstract(CalculatorTool):
    default_schema = None
"""


def test_tool_classes_of_a_module_are_offered_in_place_of_the_built_in_ones_and_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_class.py").write_text(CLASS)
    monkeypatch.setattr(sys, "path", [*sys.path])
    own = ToolsSettings(modules=["own_class"], code_path=tmp_path)
    named = ToolsSettings(modules=["own_class"], code_path=tmp_path, extra_tools=["own_class:Mine"])

    loaded = [[type(tool).__name__ for tool in tools_of(settings)] for settings in (own, named)]

    assert loaded == [["Mine"], ["Mine"]]
    with pytest.raises(ValueError, match="two named 'calculator'"):
        tools_of(ToolsSettings(modules=["own_class"], code_path=tmp_path, tools=["calculator"]))


def test_a_module_without_tools_leaves_the_built_in_ones() -> None:
    loaded = tools_of(ToolsSettings(modules=["time"]))

    assert [tool.name for tool in loaded if isinstance(tool, BaseTool)] == ["calculator", "calc_gsm8k_reward"]
