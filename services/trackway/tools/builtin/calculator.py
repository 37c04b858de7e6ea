"""`calculator`: arithmetic for the model. Stateless.

Exact arithmetic on an expression in text: parsed with `ast`, walked node by node, never evaluated as Python.

Numbers are fractions, so 0.1+0.2 is 0.3. Only a fractional power leaves exactness. Length, depth, digits and exponents
are limited, so any text quickly gives a value or an ArithmeticInputError whose message helps a model.
"""

import ast
import operator
import re
from collections.abc import Callable
from decimal import Context, Decimal
from fractions import Fraction

from pydantic import JsonValue

from trackway.tools.base import BaseTool, ToolInputError
from trackway.wire.chat import FunctionSchema, ToolSchema
from trackway.wire.tools import ToolResult

MAX_LENGTH = 500
"""Maximum characters of an expression."""
MAX_DEPTH = 100
"""Maximum nesting of operations and parentheses; two Python frames each, far below the recursion limit."""
MAX_BITS = 3322
"""Maximum bits of a numerator or denominator: 1000 decimal digits, and enough for any float."""
SIGNIFICANT_DIGITS = 10
"""Significant digits of a result that is not an integer."""

_ALLOWED = re.compile(r"[0-9.+\-*/%() \t\r\n]*")
_NUMBER = re.compile(r"[0-9]+\.?[0-9]*|\.[0-9]+")
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda left, right: Fraction(left // right),
    ast.Mod: operator.mod,
    ast.Pow: lambda left, right: _power(left, right),
}
_UNARY: dict[type[ast.unaryop], Callable[[Fraction], Fraction]] = {
    ast.UAdd: operator.pos,
    ast.USub: operator.neg,
}


class ArithmeticInputError(ValueError):
    """The expression cannot be evaluated. The message says why."""


def calculate(expression: str) -> str:
    """The value of an expression of numbers, `+ - * / // % **` and parentheses, as `show` prints it."""
    text = _checked(expression)
    try:
        return show(_value(ast.parse(text, mode="eval").body, text, 0))
    except ZeroDivisionError:
        raise ArithmeticInputError(f"division by zero in {text!r}") from None
    except SyntaxError as error:
        raise ArithmeticInputError(f"cannot read {text!r}: {error.msg}") from None
    except OverflowError:
        raise ArithmeticInputError(f"the value of {text!r} is too large") from None


def show(value: Fraction) -> str:
    """An integer exactly (`21`), anything else with up to 10 significant digits (`3.5`, `1e-12`)."""
    if value.denominator == 1:
        return str(value.numerator)
    context = Context(prec=SIGNIFICANT_DIGITS)
    rounded = context.divide(Decimal(value.numerator), Decimal(value.denominator)).normalize(context)
    if -SIGNIFICANT_DIGITS <= rounded.adjusted() < SIGNIFICANT_DIGITS:
        return format(rounded, "f")
    return str(rounded).replace("E", "e")


def _checked(expression: str) -> str:
    text = expression.strip()
    if not text:
        raise ArithmeticInputError("the expression is empty")
    if len(text) > MAX_LENGTH:
        raise ArithmeticInputError(f"the expression has {len(text)} characters, at most {MAX_LENGTH} are allowed")
    end = _ALLOWED.match(text)
    if end is not None and end.end() < len(text):
        raise ArithmeticInputError(
            f"unexpected {text[end.end()]!r} in {text!r}; use numbers without separators, + - * / // % ** and ( )"
        )
    return " ".join(text.split())


def _value(node: ast.expr, text: str, depth: int) -> Fraction:
    if depth > MAX_DEPTH:
        raise ArithmeticInputError(f"the expression is nested deeper than {MAX_DEPTH} operations; split it")
    match node:
        case ast.Constant():
            return _number(ast.get_source_segment(text, node) or "")
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _UNARY[type(op)](_value(operand, text, depth + 1))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            result = _BINARY[type(op)](_value(left, text, depth + 1), _value(right, text, depth + 1))
            return _bounded(result)
        case _:
            raise ArithmeticInputError(f"cannot read {text!r}: write one operator between two numbers or parentheses")


def _number(literal: str) -> Fraction:
    if not _NUMBER.fullmatch(literal):
        raise ArithmeticInputError(f"expected a number such as 12 or 3.5, got {literal!r}")
    return _bounded(Fraction(literal))


def _bounded(value: Fraction) -> Fraction:
    if _bits(value) > MAX_BITS:
        raise ArithmeticInputError("a value in the expression has more than 1000 digits")
    return value


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    """Exact for an integer exponent whose result fits; a float power otherwise."""
    if exponent.denominator == 1:
        if _bits(base) * abs(exponent.numerator) > 2 * MAX_BITS:
            raise ArithmeticInputError("a power in the expression has more than 1000 digits")
        return Fraction(base**exponent.numerator)
    result = float(base) ** float(exponent)
    if isinstance(result, complex):
        raise ArithmeticInputError("a fractional power of a negative number is not a real number")
    return Fraction(result)


class CalculatorTool(BaseTool):
    """Evaluates an arithmetic expression. An invalid one is the caller's error."""

    stateless = True
    default_schema = ToolSchema(
        function=FunctionSchema(
            name="calculator",
            description="Evaluate an arithmetic expression and return its value.",
            parameters={
                "type": "object",
                "properties": {
                    "expression": {
                        "type": "string",
                        "description": "Numbers, + - * / // % ** and parentheses, for example (84 + 16) / 4",
                    }
                },
                "required": ["expression"],
            },
        )
    )

    async def execute(
        self, instance_id: str, arguments: dict[str, JsonValue], /, **execute_kwargs: JsonValue
    ) -> ToolResult:
        """The value as text."""
        try:
            return ToolResult(text=calculate(str(arguments["expression"])))
        except ArithmeticInputError as error:
            raise ToolInputError(str(error)) from None
