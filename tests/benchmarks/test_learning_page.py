"""The curves of the page on algorithms, from the JSON of the learning benchmark."""

from pathlib import Path

import pytest
from benchmarks.learning_page import (
    COLUMN,
    CURVES,
    PAGE,
    SECTIONS,
    Point,
    Run,
    drawn,
    filled,
    points,
    told,
    write_figure,
)


def by_step(*values: float) -> dict[str, float]:
    """At the steps 0, 10, 20 and so on."""
    return {str(10 * index): value for index, value in enumerate(values)}


def run(setting: str, seed: int, *accuracies: float, error: str = "") -> Run:
    return {"setting": setting, "seed": seed, "accuracies": by_step(*accuracies), "error": error}


RUNS = [run("grpo", 0, 0.0, 0.5, 1.0), run("grpo", 1, 0.25, 0.75), run("dr_grpo", 0, 0.5, 0.625)]
BROKEN = run("gae", 0, 0.5, error="ended at step 3")
TWO = [("0.50 (0.50 to 0.50)", "dppo_tv"), ("1.00 (1.00 to 1.00)", "dppo_kl")]
TEXT = f"""# Algorithms

## Advantages

| name | A | {COLUMN} |
|---|---|---|
| `grpo`, `grpo_vectorized` | (S - `mean`) | 0.1 |
| the same with `norm_adv_by_std_in_grpo=false` | S | |
| `gae` | delta | |
| `rloo` | S | |

## Loss

| name | loss | {COLUMN} |
|---|---|---|
| `grpo` | A | |
| `dppo_tv`, `dppo_kl` | A | |

## Other

| `grpo` | x |
"""


def test_a_curve_has_the_steps_of_all_seeds():
    curve = points([by_step(0.0, 0.5, 1.0), by_step(0.25, 0.75)])

    assert curve == [Point(0, 0.125, 0.0, 0.25), Point(10, 0.625, 0.5, 0.75)]
    assert points([]) == []


@pytest.mark.parametrize(
    ("runs", "text"),
    [
        ([], ""),
        (RUNS[:2], "0.62 (0.50 to 0.75)"),
        ([RUNS[2], BROKEN], "0.62 (0.62 to 0.62), 1 of 2 failed"),
        ([BROKEN], "1 of 1 failed"),
    ],
)
def test_the_last_point_is_told_in_words(runs: list[Run], text: str):
    assert told(runs) == text


def test_a_curve_is_drawn_from_left_to_right_and_an_accuracy_of_one_is_at_the_top():
    image = drawn([Point(0, 0.0, 0.0, 0.0), Point(10, 0.5, 0.25, 1.0), Point(40, 1.0, 0.75, 1.0)], "0.9")

    assert '<polyline points="2.0,34.0 26.0,18.0 98.0,2.0"' in image
    assert '<polygon points="2.0,34.0 26.0,2.0 98.0,2.0 98.0,10.0 26.0,26.0 2.0,34.0"' in image
    assert '<polyline points="2.0,8.4 98.0,8.4"' in image
    assert ">0.9</text>" in image


def test_the_rows_that_have_records_are_filled_and_no_others(tmp_path: Path):
    folder = tmp_path / "learning"

    with_rewards: Run = {**run("dppo_kl", 0, 0.0, 1.0), "rewards": by_step(0.0, 0.5, 0.75)}
    page = filled(TEXT, {"estimators": [*RUNS, BROKEN], "losses": [with_rewards]}, folder)

    changed = [line for line in page.splitlines() if line not in TEXT.splitlines()]
    assert changed == [
        "| `grpo`, `grpo_vectorized` | (S - `mean`) | "
        "![0.62 (0.50 to 0.75)](../pictures/learning/estimators-grpo.svg) |",
        "| the same with `norm_adv_by_std_in_grpo=false` | S | "
        "![0.62 (0.62 to 0.62)](../pictures/learning/estimators-dr_grpo.svg) |",
        "| `gae` | delta | 1 of 1 failed |",
        "| `dppo_tv`, `dppo_kl` | A | ![1.00 (1.00 to 1.00)](../pictures/learning/losses-dppo_kl.svg) |",
    ]
    names = ["estimators-dr_grpo.svg", "estimators-grpo.svg", "losses-dppo_kl.svg"]
    assert sorted(file.name for file in folder.iterdir()) == names
    assert '<polyline points="2.0,34.0 50.0,18.0 98.0,10.0"' in (folder / names[2]).read_text()
    assert ">1.00</text>" in (folder / names[2]).read_text()
    assert filled(page, {}, folder) == page.replace("| 1 of 1 failed |", "| |"), "only a curve is kept without records"
    again = filled(page, {"losses": [run("dppo_tv", 0, 0.0, 0.5)]}, folder).splitlines()[-5]
    curves = [f"![{told}](../pictures/learning/losses-{name}.svg)" for told, name in TWO]
    assert again == f"| `dppo_tv`, `dppo_kl` | A | {' '.join(curves)} |"


def test_the_figure_of_the_teachers_has_a_curve_for_each_setting_and_the_same_bytes_again(tmp_path: Path):
    first, again = tmp_path / "first.svg", tmp_path / "again.svg"
    for file in (first, again):
        write_figure([*RUNS, BROKEN], file)

    assert first.read_bytes() == again.read_bytes()
    assert all(f">{setting}</text>" in first.read_text() for setting in ("grpo", "dr_grpo", "gae"))


def test_the_page_has_both_tables():
    lines = PAGE.read_text().splitlines()

    assert [line.endswith(f"| {COLUMN} |") for line in lines].count(True) == len(SECTIONS)
    assert PAGE.parent.parent == CURVES.parent.parent
