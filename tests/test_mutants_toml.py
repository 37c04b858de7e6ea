"""`mutants.toml` names what there is: otherwise `make test-mutants`, which runs on demand, would end at the first line
that has changed."""

import tomllib

from tests.mutants import CONFIG, Config, lines_of

GIVEN = Config.model_validate(tomllib.loads(CONFIG.read_text()))
ROOT = CONFIG.parents[1]


def test_modules_their_parts_and_their_tests_are_there():
    named = {name for module in GIVEN.modules for name in (module.path, *module.tests)}

    assert [name for name in sorted(named) if not (ROOT / name).is_file()] == []
    for module in GIVEN.modules:
        lines_of(module.path, (ROOT / module.path).read_text(), module.within)  # raises for a name that is not there


def test_lines_of_equivalent_mutants_are_those_of_their_modules():
    paths = {entry.path for entry in GIVEN.equivalents}
    texts = {path: " ".join(line.strip() for line in (ROOT / path).read_text().splitlines()) for path in paths}

    assert paths <= {module.path for module in GIVEN.modules}
    gone = [entry.line for entry in GIVEN.equivalents if f" {entry.line} " not in f" {texts[entry.path]} "]
    assert gone == []
