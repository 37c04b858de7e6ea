"""A run's plan without the run: rows are counted, nothing is started, downloaded or written."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.text import Text

from trackway.deploy import serve_config, train
from trackway.deploy.run_report import plan_report
from trackway.deploy.run_services import RunServices
from trackway.trainer.config import RunConfig
from trackway.trainer.dataset import load_samples
from trackway.trainer.forecast import forecast
from trackway.wire.agent import Sample
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import TrackwayError

MEASURED_ROWS = 10_000
"""Prompts that are tokenised for a plan; more would take minutes."""


class Rows(NamedTuple):
    """Rows to train on, None when that is not known, and the sentence about them."""

    number: int | None
    sentence: str


def dry_run(config: RunConfig, services: RunServices | None, elsewhere: bool = False) -> RenderableType:
    """The plan, and what would be refused; `services` is None for a run on services that run already.

    What other machines have, for `elsewhere`, is not looked at.
    """
    refused = [] if elsewhere else train.refusals(config)
    rows = _rows(config, services)
    try:
        plan = forecast(config, rows.number)
    except TrackwayError as error:
        refused.append(error.message)
        plan = forecast(config, None)
    notes = [Text(f"would be refused here: {reason}", style="yellow") for reason in refused]
    return Group(plan_report(plan, rows.sentence, config, services), *notes)


def _rows(config: RunConfig, services: RunServices | None) -> Rows:
    data = config.data
    try:
        rows = load_samples(data.train_files, data.train_max_samples)
    except TrackwayError as error:
        return Rows(None, f"not known: {error.message}")
    if not rows:
        return Rows(None, "not known: data.train_files names none")
    if not data.filter_overlong_prompts:
        return Rows(len(rows), str(len(rows)))
    unknown = _unmeasurable(config, len(rows))
    if services is None:
        unknown = "the tools are those of the running services"
    if services is None or unknown:
        told = f"{len(rows)}; those of more than {data.max_prompt_length} tokens are not left out yet: {unknown}"
        return Rows(len(rows), told)
    kept = len(_fitting(config, services, rows))
    return Rows(kept, f"{len(rows)}, of which {kept} have at most {data.max_prompt_length} tokens")


def _unmeasurable(config: RunConfig, rows: int) -> str:
    """Why overlong prompts are not counted now; empty when they can be."""
    model = config.actor_rollout_ref.model.path
    if model is None or not Path(model).is_dir():
        return f"the tokenizer of {model} is not on this machine"
    return f"more than {MEASURED_ROWS} rows" if rows > MEASURED_ROWS else ""


def _fitting(config: RunConfig, services: RunServices, rows: Sequence[Sample]) -> list[Sample]:
    from transformers import AutoTokenizer

    from trackway.trainer.prompt_filter import PromptFilter

    tokenizer = AutoTokenizer.from_pretrained(config.actor_rollout_ref.model.path)
    measure = PromptFilter(tokenizer, _tools(services), config.data.max_prompt_length, config.default_agent)
    return measure(rows, "data.train_files")


def _tools(services: RunServices) -> list[ToolSchema]:
    """The tools that the tool server will offer, but for those of MCP servers."""
    from trackway.tools.base import BaseTool
    from trackway.tools.registry import load_tools
    from trackway.tools.settings import ToolsSettings

    settings = ToolsSettings(**serve_config.args_of(services.serve_config, "tools"))
    sources = (settings.extra_tools, settings.tool_config, settings.tool_config_path, settings.function_tool_path)
    return [tool.tool_schema for tool in load_tools(settings.built_in, *sources) if isinstance(tool, BaseTool)]
