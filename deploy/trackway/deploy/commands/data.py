"""`trackway data make-tiny | gsm8k`: datasets in verl's row schema."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trackway.deploy.commands.options import Json
from trackway.deploy.console import print_json, stdout

if TYPE_CHECKING:
    from trackway.trainer.data import DatasetSummary

app = typer.Typer(no_args_is_help=True, help="Write datasets in verl's row schema.")


GSM8K_OUT = Path("data/gsm8k")


@app.command("make-tiny")
def make_tiny(
    out: Annotated[Path, typer.Argument(help="Folder for train.parquet and test.parquet.")],
    train_size: Annotated[int, typer.Option(min=1)] = 2000,
    test_size: Annotated[int, typer.Option(min=1)] = 256,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Write the tiny word problems.  Example: trackway data make-tiny data/tiny"""
    from trackway.trainer.data import make_tiny

    _show_dataset(make_tiny(out, train_size, test_size, seed), as_json)


@app.command("gsm8k")
def gsm8k(
    local_dataset_path: Annotated[Path, typer.Option(help="Folder of parquet or JSONL: question, answer (#### N).")],
    out: Annotated[Path, typer.Option("--local-dir", help="Folder for train.parquet and test.parquet.")] = Path(
        "data/gsm8k"
    ),
    as_json: Json = False,
) -> None:
    """Turn GSM8K into rows.  Example: trackway data gsm8k --local-dataset-path ~/gsm8k --local-dir data/gsm8k"""
    from trackway.trainer.data import make_gsm8k

    _show_dataset(make_gsm8k(local_dataset_path, out), as_json)


def _show_dataset(summary: "DatasetSummary", as_json: bool) -> None:
    if as_json:
        print_json(asdict(summary))
        return
    stdout.print(str(summary))
