"""Dumped trajectories in formats that others read: ATIF documents, a Hugging Face dataset, chat JSONL.

Filters such as `score > 0.5 and not failed and sample_index in (1, 2)`.

The text is parsed by Python's grammar and interpreted here. It is never run as Python or SQL.
"""

import ast
import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic_core import to_json

from trackway.system import new_folder, replacing, writing
from trackway.trainer.run_state.atif import read_atif, to_atif
from trackway.trainer.run_state.export import require_new
from trackway.trainer.run_state.folder import RunFolder
from trackway.trainer.run_state.trajectories import read_trajectories
from trackway.wire.base import NON_FINITE
from trackway.wire.chat import ToolSchema
from trackway.wire.errors import ErrorCode, TrackwayError
from trackway.wire.trajectory import Trajectory

Cell: TypeAlias = str | int | float | bool | None
Cells: TypeAlias = Mapping[str, Cell]

MAX_CHARS = 4096
_ORDERED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_EQUAL: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {ast.Eq: operator.eq, ast.NotEq: operator.ne}


class RowFilter:
    """A parsed filter. A comparison with an empty cell is false, except `== None` and `!= None`."""

    def __init__(self, text: str, columns: Mapping[str, type]) -> None:
        """Parse the filter. Raises TrackwayError(INVALID_REQUEST).

        columns: the type of each, `float` for numbers, `str`, `bool`, or `object` for numbers and text.
        """
        self._text, self._columns = text, columns
        try:
            tree = ast.parse(text.strip() if len(text) <= MAX_CHARS else "", mode="eval")
            self.matches: Callable[[Cells], bool] = self._condition(tree.body)
            """Return whether a row, its cells by column, passes."""
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            self._refuse(text if len(text) <= MAX_CHARS else f"{len(text)} characters")

    def _condition(self, node: ast.expr) -> Callable[[Cells], bool]:
        match node:
            case ast.BoolOp(op=op, values=values):
                conditions, combined = (
                    [self._condition(value) for value in values],
                    all if isinstance(op, ast.And) else any,
                )
                return lambda cells: combined(condition(cells) for condition in conditions)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                negated = self._condition(operand)
                return lambda cells: not negated(cells)
            case ast.Name(id=name) if self._columns.get(name) is bool:
                return lambda cells: cells[name] is True
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                pairs = [self._comparison(*pair) for pair in zip([left, *comparators], ops, comparators, strict=False)]
                return lambda cells: all(pair(cells) for pair in pairs)
        self._refuse(self._shown(node))

    def _comparison(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> Callable[[Cells], bool]:
        kind, first = self._operand(left)
        if isinstance(op, ast.In | ast.NotIn) and isinstance(right, ast.Tuple | ast.List):
            parts = [self._comparison(left, ast.Eq(), item) for item in right.elts]
            found = isinstance(op, ast.In)
            return lambda cells: any(part(cells) for part in parts) is found
        other, second = self._operand(right)
        compare = _ORDERED.get(type(op)) or _EQUAL.get(type(op))
        empty = type(None) in (kind, other)
        if (
            compare is None
            or (empty and type(op) not in _EQUAL)
            or not (empty or kind is other or object in (kind, other))
        ):
            self._refuse(f"{self._shown(left)} compared with {self._shown(right)}")

        def holds(cells: Cells) -> bool:
            a, b = first(cells), second(cells)
            if not empty and (a is None or b is None):
                return False
            try:
                return compare(a, b)
            except TypeError:  # an index that is text, and a number
                return False

        return holds

    def _operand(self, node: ast.expr) -> tuple[type, Callable[[Cells], Cell]]:
        """The type of a column or a literal, and its value in a row."""
        if isinstance(node, ast.Name):
            if node.id not in self._columns:
                self._refuse(node.id)
            return self._columns[node.id], lambda cells: cells[node.id]
        value: object = ast.literal_eval(node)
        if value is None or isinstance(value, bool | str):
            return type(value), lambda _: value
        if isinstance(value, int | float):
            return float, lambda _: value
        self._refuse(self._shown(node))

    def _shown(self, node: ast.expr) -> str:
        return ast.get_source_segment(self._text.strip(), node) or self._text

    def _refuse(self, got: str) -> NoReturn:
        message = (
            f'expected a filter such as "score > 0.5 and not failed", got {got!r}; compare the columns '
            f"{', '.join(self._columns)} with and, or, not, in"
        )
        raise TrackwayError(ErrorCode.INVALID_REQUEST, message)


TrajectoryFormat: TypeAlias = Literal["atif", "datasets", "chat"]
"""A folder with a document of ATIF 1.8 for each trajectory, a folder that `datasets.load_dataset` reads, or JSONL."""

COLUMNS: dict[str, tuple[type, Callable[[Trajectory], Cell]]] = {
    "id": (str, lambda row: row.id),
    "step": (float, lambda row: row.tags.step),
    "validation": (bool, lambda row: row.tags.validation),
    "sample_index": (object, lambda row: row.tags.sample_index),
    "rollout_n": (float, lambda row: row.tags.rollout_n),
    "score": (float, lambda row: row.reward.score if row.reward else None),
    "failed": (bool, lambda row: row.error is not None),
    "error": (str, lambda row: row.error.code if row.error else None),
    "stop_reason": (str, lambda row: row.stop_reason),
    "agent_name": (str, lambda row: row.agent_name),
    "data_source": (str, lambda row: row.data_source),
    "ground_truth": (str, lambda row: row.ground_truth),
    "num_turns": (float, lambda row: row.num_turns),
    "tokens": (float, lambda row: sum(len(part.response_ids) for part in row.rows)),
    "seconds": (float, lambda row: row.timings.total),
    "incidents": (float, lambda row: len(row.incidents)),
    "traced": (bool, lambda row: row.trace_id is not None),
    "is_baseline": (bool, lambda row: row.is_baseline),
}
"""The type and value of each column that a filter can compare, and that datasets and chat lines have."""

_TEXT = pa.string()
_CALL = {"id": _TEXT, "type": _TEXT, "function": pa.struct({"name": _TEXT, "arguments": _TEXT})}
_MESSAGE = {"role": _TEXT, "content": _TEXT, "tool_calls": pa.list_(pa.struct(_CALL))}
_MESSAGE |= {"tool_call_id": _TEXT, "name": _TEXT}
_ARROW = {str: _TEXT, object: _TEXT, bool: pa.bool_(), float: pa.int64()}
_SCHEMA = pa.schema(
    {
        **{name: _ARROW[kind] for name, (kind, _) in COLUMNS.items()},
        **dict.fromkeys(("score", "seconds"), pa.float64()),
        "messages": pa.list_(pa.struct(_MESSAGE)),
        "prompt_ids": pa.list_(pa.int64()),
        "response_ids": pa.list_(pa.int64()),
        "response_mask": pa.list_(pa.int8()),
        "response_logprobs": pa.list_(pa.float64()),
    }
)
_TOKENS = {"prompt_ids", "response_ids", "response_mask", "response_logprobs"}
_CARD = """# Trajectories

Rollouts of language-model agents, written by `trackway export`. A line is a row of tokens. A trajectory whose
calls are no single conversation has several lines with its `id`, and all have the messages of the first.

- `messages`: the conversation in OpenAI's chat format.
- `prompt_ids`, `response_ids`: token ids. `response_mask` is 1 for tokens that the model sampled and a trainer may use.
- `response_logprobs`: the log-probability of each sampled token, 0.0 for others.
- `score`: the reward; empty for a failed rollout.
"""


class ExportedTrajectories(NamedTuple):
    """The result of an export."""

    format: TrajectoryFormat
    target: str
    trajectories: int
    filtered: int
    """Trajectories that the filter left out."""
    further_rows: int
    """Rows of tokens beside the first of a trajectory, whose messages chat lines lack."""


class Source(NamedTuple):
    """Trajectories to export."""

    files: Sequence[Path]
    """Parquet of a run, or ATIF documents."""
    model: str | None = None
    tools: Sequence[ToolSchema] = ()


def source_of(run: RunFolder, step: int | None, validation: bool) -> Source:
    """The trajectories of a run, of one step or of all. Raises TrackwayError(NOT_FOUND) without any."""
    files = dumped_files(run, step, validation)
    return Source(files, run.config().actor_rollout_ref.model.path, run.tools())


def dumped_files(run: RunFolder, step: int | None, validation: bool) -> list[Path]:
    """The files of a run's trajectories, by step. Raises TrackwayError(NOT_FOUND) without any."""
    name = f"{'val_' if validation else ''}step_{'*' if step is None else step}.parquet"
    files = sorted((run.path / "trajectories").glob(name), key=lambda file: int(file.stem.rpartition("_")[2]))
    if not files:
        message = (
            f"expected {name} in {run.path / 'trajectories'}, got none; give another --step, or --validation for "
            "rollouts of validations and evaluations"
        )
        raise TrackwayError(ErrorCode.NOT_FOUND, message)
    return files


def atif_files(path: Path) -> list[Path]:
    """The file itself, or the documents of a folder and the folders in it. Raises TrackwayError(NOT_FOUND).

    In a folder with `trajectory*.json`, as a job of Harbor is, other JSON files are no documents.
    """
    named = [path] if path.is_file() else sorted(path.rglob("trajectory*.json"))
    files = named or sorted(path.rglob("*.json"))
    if not files:
        raise TrackwayError(
            ErrorCode.NOT_FOUND, f"expected ATIF documents (*.json) in {path}, got none; give their folder"
        )
    return files


def export_trajectories(
    source: Source,
    kind: TrajectoryFormat,
    target: Path,
    where: str | None = None,
    report: Callable[[int, int], None] = lambda done, total: None,
) -> ExportedTrajectories:
    """Write the trajectories that pass the filter to `target`, which appears whole at the end.

    where: see RowFilter, over COLUMNS. report: gets the number of files read, and of all.
    Raises TrackwayError for an existing target, a wrong filter, or no trajectory left, and StorageError.
    """
    require_new(target)
    chosen = RowFilter(where, {name: kind for name, (kind, _) in COLUMNS.items()}) if where is not None else None
    counts = {"trajectories": 0, "filtered": 0, "further_rows": 0}

    def trajectories() -> Iterator[list[Trajectory]]:
        for place, file in enumerate(source.files):
            report(place, len(source.files))
            found = [read_atif(file)] if file.suffix == ".json" else read_trajectories(file)
            kept = [row for row in found if chosen is None or chosen.matches(_cells(row))]
            counts["trajectories"] += len(kept)
            counts["filtered"] += len(found) - len(kept)
            counts["further_rows"] += sum(len(row.further_rows) for row in kept)
            yield kept
        report(len(source.files), len(source.files))
        if not counts["trajectories"]:
            message = f"expected trajectories that match, got none of {counts['filtered']}; widen --where"
            raise TrackwayError(ErrorCode.INVALID_REQUEST, message)

    with writing(target, "the export"):
        if kind == "chat":
            target.parent.mkdir(parents=True, exist_ok=True)
            with replacing(target, "the export") as draft, draft.open("xb") as file:
                for kept in trajectories():
                    file.writelines(_chat_line(row, source.tools) for row in kept)
        else:
            with new_folder(target) as draft:
                (_write_atif if kind == "atif" else _write_dataset)(draft, trajectories(), source)
    return ExportedTrajectories(kind, str(target), **counts)


def _write_atif(folder: Path, trajectories: Iterator[list[Trajectory]], source: Source) -> None:
    for number, row in enumerate(itertools.chain.from_iterable(trajectories)):
        part = folder / f"{'val_' if row.tags.validation else ''}step_{row.tags.step}"
        part.mkdir(exist_ok=True)
        document = to_atif(row, source.model, _offered(row, source.tools))
        (part / f"{number:06d}.json").write_bytes(to_json(document, inf_nan_mode=NON_FINITE))


def _write_dataset(folder: Path, trajectories: Iterator[list[Trajectory]], source: Source) -> None:
    """Write a parquet file for each split, and the card."""
    from datasets import DatasetInfo, Features
    from datasets.info import DatasetInfosDict
    from huggingface_hub import DatasetCardData

    writers: dict[str, pq.ParquetWriter] = {}
    (folder / "data").mkdir()
    with ExitStack() as stack:
        for kept in trajectories:
            for split, validation in (("train", False), ("validation", True)):
                lines = [
                    {**_texts(row), "messages": _messages(row), **part.model_dump(include=_TOKENS)}
                    for row in kept
                    for part in row.rows
                    if row.tags.validation is validation
                ]
                if lines and split not in writers:
                    file = folder / "data" / f"{split}.parquet"
                    writers[split] = stack.enter_context(pq.ParquetWriter(file, _SCHEMA, compression="zstd"))
                if lines:
                    writers[split].write_table(pa.Table.from_pylist(lines, _SCHEMA))
    files = [{"split": split, "path": f"data/{split}.parquet"} for split in writers]
    card = DatasetCardData(configs=[{"config_name": "default", "data_files": files}], tags=["trackway"])
    DatasetInfosDict({"default": DatasetInfo(features=Features.from_arrow_schema(_SCHEMA))}).to_dataset_card_data(card)
    (folder / "README.md").write_text(f"---\n{card}\n---\n\n{_CARD}")


def _chat_line(trajectory: Trajectory, tools: Sequence[ToolSchema]) -> bytes:
    columns = _texts(trajectory)
    offered = _offered(trajectory, tools)
    shown = {"tools": [tool.model_dump(mode="json") for tool in offered]} if offered else {}
    line = {"messages": _messages(trajectory), **shown, "reward": columns.pop("score"), **columns}
    return to_json(line, inf_nan_mode="null") + b"\n"


def _offered(trajectory: Trajectory, tools: Sequence[ToolSchema]) -> list[ToolSchema]:
    """The tools that the trajectory's prompt describes, in its order."""
    known = {tool.function.name: tool for tool in tools}
    return [known[name] for name in trajectory.offered_tools if name in known]


def _messages(trajectory: Trajectory) -> list[dict[str, Any]]:
    messages = [*trajectory.prompt_messages, *(message for turn in trajectory.turns for message in turn.messages)]
    return [message.model_dump(exclude_none=True) for message in messages]


def _cells(trajectory: Trajectory) -> dict[str, Cell]:
    return {name: value(trajectory) for name, (_, value) in COLUMNS.items()}


def _texts(trajectory: Trajectory) -> dict[str, Cell]:
    """The columns, with an index as text, since loaders expect one type in a column."""
    return {**_cells(trajectory), "sample_index": str(trajectory.tags.sample_index)}
