"""Datasets in verl's row schema: the tiny problems, GSM8K, and the parquet files that hold them."""

from trackway.trainer.data.make import DatasetSummary, SplitSummary, make_gsm8k, make_tiny
from trackway.trainer.data.row_files import Rejected, read_rows, write_rows

__all__ = ["DatasetSummary", "Rejected", "SplitSummary", "make_gsm8k", "make_tiny", "read_rows", "write_rows"]
