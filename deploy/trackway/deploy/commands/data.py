"""`trackway data make-tiny | gsm8k`: datasets in verl's row schema."""

import os
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer
from rich.progress import track

from trackway.deploy.commands.options import json_of
from trackway.deploy.terminal.progress import print_json, stderr, stdout

if TYPE_CHECKING:
    from trackway.trainer.data import DatasetSummary

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True)

VERL_SPELLING = {"token_normalize_func": lambda name: name.replace("_", "-")}
"""Accept `_` for `-` in option names, as in verl's preprocessing scripts."""


@app.command("make-tiny")
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder for train.parquet and test.parquet.")],
    train_size: Annotated[int, typer.Option(min=1)] = 2000,
    test_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    agent_name: Annotated[str, typer.Option(help="The agent loop of the rows, such as external.")] = "tool_agent",
    as_json: Annotated[bool, json_of("the files and their numbers of rows")] = False,
) -> None:
    """Write the tiny word-problem dataset.  Example: trackway data make-tiny data/tiny"""
    from trackway.trainer.data import make_tiny

    _show_dataset(make_tiny(out, train_size, test_size, seed, agent_name), as_json)


@app.command("gsm8k", context_settings=VERL_SPELLING)
def gsm8k(
    out: Annotated[
        Path, typer.Option("--local-dir", "--local-save-dir", help="Folder for train.parquet and test.parquet.")
    ] = Path("~/data/gsm8k"),
    local_dataset_path: Annotated[
        Path | None,
        typer.Option(help="Folder of parquet or JSONL: question, answer (#### N); default the Hugging Face Hub."),
    ] = None,
    copy_to: Annotated[
        str | None,
        typer.Option("--hdfs-dir", help="Also copy the files to this fsspec URL (hdfs://, s3://, ...) or path."),
    ] = None,
    as_json: Annotated[bool, json_of("the files and their numbers of rows")] = False,
) -> None:
    """Convert GSM8K.  Example: trackway data gsm8k --local-dir data/gsm8k --local-dataset-path ~/gsm8k"""
    from trackway.trainer.data import make_gsm8k

    hidden = as_json or not stderr.is_terminal
    if hidden:
        os.environ |= {"HF_DATASETS_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}

    def bar(items: Iterable[T], what: str) -> Iterable[T]:
        return track(items, what, console=stderr, transient=True, disable=hidden)

    _show_dataset(make_gsm8k(local_dataset_path, out, copy_to, bar), as_json)


def _show_dataset(summary: "DatasetSummary", as_json: bool) -> None:
    if as_json:
        print_json(asdict(summary))
        return
    stdout.print(str(summary), soft_wrap=True)
