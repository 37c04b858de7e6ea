"""CONTRIBUTING.md against the tree: its map, its table of where to look, its commands; and the size of each package."""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text()
PROJECTS = ROOT / "deploy/trackway/deploy/bundled/projects"
"""The projects of `trackway init`, whose files are no modules of Trackway."""
LARGEST_PACKAGE = 20
"""Modules beside `__init__.py`."""
PACKAGES = sorted(
    init.parent
    for folder in ("clients", "services", "deploy")
    for init in (ROOT / folder).glob("trackway/*/**/__init__.py")
)
IGNORED = set((ROOT / ".gitignore").read_text().split())
FOLDERS = {path.name for path in ROOT.glob("[!.]*/") if path.is_dir() and f"{path.name}/" not in IGNORED}


def section(title: str) -> str:
    """The text under a heading of the second level."""
    return re.split(r"^## ", TEXT.split(f"\n## {title}\n")[1], maxsplit=1, flags=re.MULTILINE)[0]


def paths(text: str) -> set[str]:
    """The relative paths in code spans; a bare file name is not a path."""
    return set(re.findall(r"`([\w.-]+(?:/[\w.-]*)+)`", text))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_the_map_has_every_folder_of_the_repository_and_the_rooms_of_trackway() -> None:
    mapped = {path.removesuffix("/") for path in paths(section("The map"))}
    rooms = {relative(package) for package in PACKAGES if package.parent.name == "trackway"}

    assert rooms | FOLDERS <= mapped
    assert len(mapped) <= 30  # a newcomer reads it in a minute


@pytest.mark.parametrize("title", ["The map", "To change X, look at Y", "Tests"])
def test_every_path_that_a_section_names_exists(title: str) -> None:
    named = paths(section(title))

    assert named
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []


def test_every_command_is_a_target_of_the_makefile() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    commands = set(re.findall(r"(?:^|`)make ([a-z-]+)", TEXT, flags=re.MULTILINE))

    assert "test-all" in commands
    assert commands - targets == set()


def test_ci_runs_the_same_commands_here_and_on_github() -> None:
    script = re.findall(r"^make .*$", (ROOT / ".ci" / "run").read_text(), flags=re.MULTILINE)
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    commands = [step["run"] for step in workflow["jobs"]["ci"]["steps"] if "run" in step]

    assert script == commands == ["make check", "make test-all"]


@pytest.mark.parametrize("package", PACKAGES, ids=relative)
def test_a_package_says_what_it_is_for_and_has_at_most_twenty_modules(package: Path) -> None:
    modules = [path for path in package.glob("*.py") if path.name != "__init__.py"]

    assert ast.get_docstring(ast.parse((package / "__init__.py").read_text()))
    assert len(modules) <= LARGEST_PACKAGE


def test_every_folder_with_modules_is_a_package() -> None:
    modules = [
        path for folder in ("clients", "services", "deploy") for path in (ROOT / folder).glob("trackway/*/**/*.py")
    ]

    folders = {path.parent for path in modules if PROJECTS not in path.parents}
    assert {relative(folder) for folder in folders if not (folder / "__init__.py").exists()} == set()


def test_a_public_class_name_means_one_thing() -> None:
    homes: dict[str, list[str]] = {}
    for folder in ("clients", "services", "deploy"):
        for path in (ROOT / folder).glob("trackway/**/*.py"):
            if PROJECTS in path.parents:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    homes.setdefault(node.name, []).append(relative(path))

    homes.pop("BaseTool")  # ours, and the one that verl's tools extend
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
