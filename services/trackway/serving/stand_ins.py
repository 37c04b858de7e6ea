"""Stand-ins for the modules of verl that own code imports, for installations without verl.

`from verl.tools.base_tool import BaseTool` then gives our class of that interface. An installed verl comes first.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

STAND_INS = {
    "verl.experimental.agent_loop": "trackway.agent.verl.interface",
    "verl.experimental.agent_loop.agent_loop": "trackway.agent.verl.interface",
    "verl.experimental.agent_loop.tool_parser": "trackway.agent.verl.interface",
    "verl.tools.base_tool": "trackway.tools.verl.interface",
    "verl.tools.function_tool": "trackway.tools",
    "verl.tools.schemas": "trackway.tools.verl.interface",
    "verl.utils.profiler": "trackway.agent.verl.interface",
    "verl.utils.rollout_trace": "trackway.tracing",
    "verl.workers.rollout.llm_server": "trackway.agent.verl.interface",
    "verl.workers.rollout.replica": "trackway.agent.verl.interface",
}
"""Module of verl -> the module that has its names here."""

_MARK = "__trackway_stand_in__"


def offer_stand_ins() -> None:
    """Make the stand-ins importable; idempotent."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())  # last, so that an installed verl is found first


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        parent = sys.modules.get(fullname.rpartition(".")[0])
        is_package = any(name.startswith(f"{fullname}.") for name in STAND_INS)
        if not (is_package or fullname in STAND_INS) or (parent is not None and not hasattr(parent, _MARK)):
            return None
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        setattr(module, _MARK, True)
        ours = STAND_INS.get(module.__name__)
        if ours is not None:
            source = importlib.import_module(ours)
            names = {name for name in vars(source) if not name.startswith("__")}
            names |= {*getattr(source, "__all__", ())}  # a package may import its names at first use
            vars(module).update({name: getattr(source, name) for name in names})
