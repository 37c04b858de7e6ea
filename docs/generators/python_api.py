"""The pages of the Python API: what a public package exports. mkdocstrings fills them in from the docstrings."""

import importlib

from generators.markdown import page


def python_api(package: str, title: str) -> str:
    """The package's docstring and everything in its `__all__`."""
    summary = f"::: {package}\n    options:\n      members: false\n      show_root_heading: false"
    return page(title, summary, *(f"::: {package}.{name}" for name in importlib.import_module(package).__all__))
