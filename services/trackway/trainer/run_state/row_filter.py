"""Filters such as `score > 0.5 and not failed and sample_index in (1, 2)`.

The text is parsed by Python's grammar and interpreted here. It is never run as Python or SQL.
"""

import ast
import operator
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeAlias

from trackway.wire.errors import ErrorCode, TrackwayError

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
