"""The pages of the Python API: what a public package exports. mkdocstrings fills them in from the docstrings."""

import importlib
import inspect

from generators.markdown import code, page, table

RESULTS = {
    "trackway": (
        *("trackway.evaluation.summary.RolloutSummary", "trackway.evaluation.summary.Paired"),
        *("trackway.trainer.run_state.export.Export", "trackway.wire.trainer.RunInfo"),
        "trackway.trainer.run_state.trajectory_export.ExportedTrajectories",
    )
}
"""Types that a package's functions return and that it does not export."""
PACKAGES = {
    "trackway": ("Train and evaluate", "trackway"),
    "clients": ("Clients", "trackway.clients"),
    "agent": ("Agent loops", "trackway.agent"),
    "tools": ("Tools", "trackway.tools"),
    "reward": ("Scorers", "trackway.reward"),
    "tracing": ("Tracing", "trackway.tracing"),
}
"""Title and package by the name of its page."""


def overview() -> str:
    """The packages that code of one's own imports."""
    rows = ((f"[{title}]({name}.md)", code(package), _summary(package)) for name, (title, package) in PACKAGES.items())
    return page(
        "Python API",
        "What your own code may import: clients of the services, and what agent loops, tools and scorers are made of. "
        "Each page has what its package exports; anything else may change.",
        table(("Page", "Package", "Purpose"), rows),
    )


def python_api(package: str, title: str) -> str:
    """The package's docstring and everything in its `__all__`."""
    options = "    options:\n      members: false\n      show_root_heading: false"
    has_parts = "." in package  # mkdocstrings reads none of the package above, which is in three folders
    summary = f"::: {package}\n{options}" if has_parts else inspect.getdoc(importlib.import_module(package)) or ""
    source = f"Import everything on this page from `{package}`."
    exported = importlib.import_module(package)
    functions_first = sorted(exported.__all__, key=lambda name: inspect.isclass(getattr(exported, name)))
    parts = [_defined(package, name) for name in functions_first]
    results = RESULTS.get(package, ())
    returned = ["These are results; no code imports them."] if results else []
    return page(
        title, summary, source, *(f"::: {part}" for part in parts), *returned, *(f"::: {part}" for part in results)
    )


def _defined(package: str, name: str) -> str:
    """Where an export is defined: a module of the package may have the same name and would be taken for it."""
    exported = inspect.unwrap(getattr(importlib.import_module(package), name))
    module = getattr(exported, "__module__", "")
    return f"{module if module.startswith('trackway.') else package}.{name}"


def _summary(package: str) -> str:
    return (inspect.getdoc(importlib.import_module(package)) or "").partition("\n\n")[0]
