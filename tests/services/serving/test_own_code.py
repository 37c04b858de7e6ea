"""A user's modules and files: found by their folder, and named with the line when they cannot be imported."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from trackway.serving.user_code import Declared, OwnCodeError, import_modules, module_of_file


@pytest.fixture(autouse=True)
def path_restored() -> Iterator[None]:
    before, modules = [*sys.path], set(sys.modules)
    yield
    sys.path[:] = before
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def test_modules_are_found_in_the_projects_folder(tmp_path: Path) -> None:
    (tmp_path / "own_greeting.py").write_text("WORD = 'hello'")

    import_modules(["own_greeting"], tmp_path)

    assert sys.modules["own_greeting"].WORD == "hello"


def test_the_projects_folder_comes_before_other_folders_and_only_once(tmp_path: Path) -> None:
    import_modules([], tmp_path)
    import_modules([], tmp_path)

    assert sys.path[0] == str(tmp_path)
    assert sys.path.count(str(tmp_path)) == 1


def test_an_error_on_import_is_told_with_the_users_line(tmp_path: Path) -> None:
    (tmp_path / "own_outer.py").write_text("import own_inner\n")
    (tmp_path / "own_inner.py").write_text("\n\nvalue = 1 / 0\n")

    with pytest.raises(OwnCodeError) as caught:
        import_modules(["own_outer"], tmp_path)

    place = f"{tmp_path}/own_inner.py:3"
    assert str(caught.value) == f"setting modules, 'own_outer': ZeroDivisionError: division by zero ({place})"


def test_a_syntax_error_is_told_with_its_line(tmp_path: Path) -> None:
    (tmp_path / "own_typo.py").write_text("x = 1\ndef f(:\n")

    with pytest.raises(OwnCodeError, match=r"'own_typo': SyntaxError: invalid syntax \(own_typo.py, line 2\)"):
        import_modules(["own_typo"], tmp_path)


def test_a_module_that_does_not_exist_is_told_without_our_own_lines(tmp_path: Path) -> None:
    with pytest.raises(OwnCodeError) as caught:
        import_modules(["own_nowhere"], tmp_path)

    assert str(caught.value) == "setting modules, 'own_nowhere': ModuleNotFoundError: No module named 'own_nowhere'"


def test_a_folder_that_does_not_exist_is_told(tmp_path: Path) -> None:
    with pytest.raises(OwnCodeError, match=r"setting code_path: expected a folder, got '.*/gone'; correct the path"):
        import_modules([], tmp_path / "gone")


def test_a_file_is_no_module_of_another_of_the_same_name(tmp_path: Path) -> None:
    (tmp_path / "json.py").write_text("MINE = True")

    assert module_of_file(tmp_path / "json.py", "some.path").MINE
    assert not hasattr(sys.modules["json"], "MINE")


def test_a_missing_file_is_told_with_its_setting(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"some\.path: expected a Python file, got '.*gone.py'"):
        module_of_file(tmp_path / "gone.py", "some.path")


def test_parts_are_those_of_a_module_and_of_the_modules_below_it() -> None:
    declared = Declared[int]()
    for number, module in enumerate(("own", "own.tools", "owner", "other")):

        def part() -> None: ...

        part.__module__ = module
        declared.add(part, number)

    assert declared.within(["own"]) == [0, 1]
    assert declared.within(["owner", "other"]) == [2, 3]
    assert declared.within([]) == []
