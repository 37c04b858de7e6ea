"""The reward curve of a run as a PNG."""

from collections.abc import Sequence
from pathlib import Path

from trackway.system import replacing
from trackway.wire.trainer import MetricsRow


def reward_curve(rows: Sequence[MetricsRow], image: Path, title: str) -> None:
    """Plot the mean reward of each step, and the validation accuracy at the steps that measured it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rewards = [(row.step, row.data["critic/score/mean"]) for row in rows if "critic/score/mean" in row.data]
    accuracies = [(row.step, value) for row in rows for key, value in row.data.items() if is_accuracy(key)]
    figure, axes = pyplot.subplots(figsize=(7, 3.6), dpi=130)
    axes.plot(*zip(*rewards, strict=True), color="#1f6feb", marker="o", markersize=3, label="training reward (mean)")
    if accuracies:
        axes.plot(*zip(*accuracies, strict=True), "D", color="#d1242f", label="held-out accuracy (sampled, T=1)")
    axes.set(xlabel="GRPO step", ylabel="share of correct answers", title=title, ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right", frameon=False)
    figure.tight_layout()
    with replacing(image) as draft:
        figure.savefig(draft, format="png")
    pyplot.close(figure)


def is_accuracy(metric: str) -> bool:
    """Return whether a metric is a validation accuracy in verl's naming."""
    return metric.startswith("val-core/") and "/acc/" in metric
