"""The tool. The model reads its name, its parameters and its docstring."""

import re
from operator import add, floordiv, mul, sub

from trackway.tools import ToolInputError, function_tool

OPERATIONS = {"+": add, "-": sub, "*": mul, "/": floordiv}


@function_tool
def calculator(expression: str) -> str:
    """Calculate with two whole numbers.

    Args:
        expression: A number, one of + - * /, and a number, such as 12-5.
    """
    match = re.fullmatch(r"\s*(\d{1,9})\s*([-+*/])\s*(\d{1,9})\s*", expression)
    if match is None:
        raise ToolInputError(f"expected two whole numbers and one of + - * /, got {expression!r}")
    left, operation, right = int(match[1]), match[2], int(match[3])
    if operation == "/" and right == 0:
        raise ToolInputError(f"expected a divisor other than 0, got {expression!r}")
    return str(OPERATIONS[operation](left, right))
