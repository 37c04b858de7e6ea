"""Data of a run that backends have not received, in words."""

from trackway.wire.trainer import BackendSummary

_NAMES = {"mlflow": "MLflow", "weave": "Weave", "wandb": "W&B", "tensorboard": "TensorBoard"}


def sentences(summary: BackendSummary) -> list[str]:
    """A sentence about waiting data and one about lost data. Empty when the backend has everything."""
    name, messages = _NAMES.get(summary.backend, summary.backend), []
    if summary.waiting:
        parts = [
            _count(summary.rows_waiting, "row", "of metrics"),
            _count(summary.feedback_waiting, "value", "of feedback"),
            "the run's final status" if summary.end_waiting else "",
        ]
        why = f" ({summary.waits_for})" if summary.waits_for else ""
        messages.append(f"{' and '.join(filter(None, parts))} not yet in {name}{why}: kept on disk and sent later")
    if summary.lost:
        parts = [
            _count(summary.metrics_lost, "value", "of metrics"),
            _count(summary.feedback_lost, "value", "of feedback"),
        ]
        why = f": {summary.lost_because}" if summary.lost_because else ""
        messages.append(f"{' and '.join(filter(None, parts))} lost for {name}{why}")
    return messages


def _count(number: int, noun: str, of: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)} {of}" if number else ""
