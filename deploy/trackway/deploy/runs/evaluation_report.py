"""Draws the result of an evaluation for a terminal."""

from collections.abc import Mapping
from pathlib import Path

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from trackway.evaluation.summary import Evaluation, Paired, RolloutSummary
from trackway.system import visible
from trackway.trainer.metrics import Estimate


def evaluation_report(
    evaluation: Evaluation, tasks: Path, against: str | None = None, compared: Paired | None = None
) -> RenderableType:
    """A column for all rows, one for each data source if there are several, the file of each row and the comparison."""
    total = evaluation.summary
    assert total is not None
    columns = {"all rows": total, **(evaluation.data_sources if len(evaluation.data_sources) > 1 else {})}
    table = Table("", *(escape(visible(name)) for name in columns), box=None, pad_edge=False)
    for name, cells in _lines(columns).items():
        table.add_row(name, *cells)
    title = f"[bold]{evaluation.name}[/]   {escape(visible(evaluation.model))}"
    details = f"temperature {evaluation.temperature:g}, a rollout passes with a score over {evaluation.pass_above:g}"
    parts: list[RenderableType] = [title, details, "", table]
    if total.failed:
        errors = ", ".join(f"{count} {code}" for code, count in total.errors.items())
        parts += ["", f"[yellow]{total.failed} rollouts failed and count nowhere:[/] {errors}"]
    parts += ["", Text(f"each row: {tasks}", "dim", overflow="fold")]
    if against is not None:
        parts += ["", _compared(against, compared)]
    return Group(*parts)


def _lines(columns: Mapping[str, RolloutSummary]) -> dict[str, list[str]]:
    parts = [*columns.values()]
    lines = {"rows x rollouts": [f"{column.tasks} x {column.rollouts / max(1, column.tasks):g}" for column in parts]}
    if all(column.score is None for column in parts):
        return lines
    lines["score"] = [_estimate(column.score) for column in parts]
    for label, name in (
        ("pass@", "pass_at"),
        ("pass^", "pass_all"),
        ("best@", "best_at"),
        ("majority@", "majority_at"),
    ):
        rates = [getattr(column, name) for column in parts]
        first = 1 if name == "pass_at" else 2  # of one rollout, all are its mean
        for k in sorted({k for estimates in rates for k in estimates if k >= first}):
            lines[f"{label}{k}"] = [_estimate(estimates.get(k)) for estimates in rates]
    if any(column.no_answer is not None for column in parts):
        lines["without answer"] = ["" if column.no_answer is None else f"{column.no_answer:.1%}" for column in parts]
    lines["cut by a limit"] = [f"{column.cut:.1%}" for column in parts]
    lines["tokens written"] = [f"{column.response_tokens:.1f}" for column in parts]
    lines["tokens in all"] = [f"{column.tokens:,}" for column in parts]
    lines["turns"] = [f"{column.turns:.2f}" for column in parts]
    if any(column.tool_calls for column in parts):
        lines["tool calls"] = [f"{column.tool_calls:.2f}, failed {column.failed_calls:.2f}" for column in parts]
    return lines


def _estimate(estimate: Estimate | None) -> str:
    if estimate is None:
        return ""
    error = "" if estimate.std_err is None else f" ± {estimate.std_err:.3f}"
    return f"{estimate.value:.3f}{error}"


def _compared(against: str, compared: Paired | None) -> str:
    if compared is None:
        return f"{against}: no row in common"
    score = compared.score
    interval = "" if score.interval is None else f", 95 % interval {score.interval[0]:+.3f} to {score.interval[1]:+.3f}"
    left_out = f", {compared.left_out} left out" if compared.left_out else ""
    return (
        f"[bold]{score.value:+.3f}[/] in score against {against}{interval}: of {score.tasks} rows {compared.better} "
        f"better, {compared.worse} worse{left_out}"
    )
