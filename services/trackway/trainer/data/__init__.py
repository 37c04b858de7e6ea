"""Datasets in verl's row schema: the tiny problems, GSM8K, and the parquet files that hold them."""

from trackway.trainer.data.make import DatasetSummary, SplitSummary, make_gsm8k, make_tiny
from trackway.trainer.data.parquet import read_rows, write_rows
from trackway.trainer.data.records import Rejected

__all__ = ["DatasetSummary", "Rejected", "SplitSummary", "make_gsm8k", "make_tiny", "read_rows", "write_rows"]
