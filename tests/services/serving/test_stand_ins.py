"""Modules of verl that own code imports: ours stand in for them only where no verl is installed."""

import subprocess
import sys
from pathlib import Path

import pytest

from trackway.serving.user_code import STAND_INS

pytestmark = pytest.mark.slow

OFFER = "from trackway.serving.user_code import offer_stand_ins\noffer_stand_ins()\noffer_stand_ins()\n"


def python(code: str, folder: Path) -> str:
    command = [sys.executable, "-c", f"import sys\nsys.path.insert(0, {str(folder)!r})\n{OFFER}{code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return done.stdout.strip() or done.stderr.strip().splitlines()[-1]


def test_every_module_has_what_own_code_imports_from_it(tmp_path: Path) -> None:
    imports = [
        "from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register",
        "from verl.experimental.agent_loop import AgentLoopBase as again",
        "from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser",
        "from verl.tools.base_tool import BaseTool",
        "from verl.tools.function_tool import function_tool",
        "from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse",
        "from verl.utils.profiler import simple_timer",
        "from verl.utils.rollout_trace import rollout_trace_op, RolloutTraceConfig",
        "from verl.workers.rollout.replica import TokenOutput",
        "from verl.workers.rollout.llm_server import LLMServerClient",
    ]

    assert {line.split()[1] for line in imports} == STAND_INS.keys()
    assert python("\n".join([*imports, "print(again is AgentLoopBase)"]), tmp_path) == "True"


def test_other_modules_of_verl_are_missing(tmp_path: Path) -> None:
    assert python("import verl.trainer", tmp_path) == "ModuleNotFoundError: No module named 'verl.trainer'"


def test_an_installed_verl_comes_first_and_gets_no_stand_in(tmp_path: Path) -> None:
    (tmp_path / "verl" / "tools").mkdir(parents=True)
    (tmp_path / "verl" / "__init__.py").write_text("")
    (tmp_path / "verl" / "tools" / "__init__.py").write_text("")
    (tmp_path / "verl" / "tools" / "base_tool.py").write_text("BaseTool = 'installed'")

    assert python("from verl.tools.base_tool import BaseTool\nprint(BaseTool)", tmp_path) == "installed"
    assert python("import verl.tools.schemas", tmp_path) == "ModuleNotFoundError: No module named 'verl.tools.schemas'"
