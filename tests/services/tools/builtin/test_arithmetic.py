import time

import pytest

from tests.time_limits import slowness
from trackway.tools.builtin.calculator import ArithmeticInputError, calculate


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ("84/4", "21"),
        ("7/2", "3.5"),
        ("1/3", "0.3333333333"),
        ("2/3", "0.6666666667"),
        ("0.1 + 0.2", "0.3"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-3 + +5", "2"),
        ("--3", "3"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("-7 % 3", "2"),
        ("7.5 % 2", "1.5"),
        ("2 ** 10", "1024"),
        ("2 ** -2", "0.25"),
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("2 ** 0.5", "1.414213562"),
        ("4 ** 0.5", "2"),
        ("0.5 + .5 + 1.", "2"),
        ("  48\n+ 24 ", "72"),
        ("12345678901234567890 * 10", "123456789012345678900"),
        ("10 ** 999", "1" + "0" * 999),
        ("12345678901.5", "1.23456789e+10"),
        ("1 / 10 ** 12", "1e-12"),
        ("1000000.5", "1000000.5"),
    ],
)
def test_an_expression_has_its_exact_value(expression: str, value: str) -> None:
    assert calculate(expression) == value


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("3/0", "division by zero in '3/0'"),
        ("3 % 0", "division by zero in '3 % 0'"),
        ("0 ** -1", "division by zero in '0 ** -1'"),
        ("", "the expression is empty"),
        ("(2 + 3", "cannot read '(2 + 3': '(' was never closed"),
        ("()", "cannot read '()': write one operator between two numbers or parentheses"),
        ("2(3)", "cannot read '2(3)': write one operator between two numbers or parentheses"),
        ("...", "expected a number such as 12 or 3.5, got '...'"),
        ("(-8) ** 0.5", "a fractional power of a negative number is not a real number"),
        ("9 ** 9 ** 9 ** 9", "a power in the expression has more than 1000 digits"),
        ("10 ** 1001", "a value in the expression has more than 1000 digits"),
        ("10**999 * 10**999", "a value in the expression has more than 1000 digits"),
        ("(10**900) ** 0.5", "the value of '(10**900) ** 0.5' is too large"),
        ("1" * 501, "the expression has 501 characters, at most 500 are allowed"),
        ("-" * 101 + "1", "the expression is nested deeper than 100 operations; split it"),
    ],
)
def test_a_wrong_expression_is_told_in_words(expression: str, message: str) -> None:
    with pytest.raises(ArithmeticInputError) as caught:
        calculate(expression)

    assert str(caught.value) == message


@pytest.mark.parametrize(
    "expression",
    [
        "__import__('os')",
        "abs(1)",
        "x",
        "1 if 2 else 3",
        "[1]",
        "1;2",
        "1e9",
        "1.real",
        "1_0",
        "0x1f",
        "2 ^ 3",
        "1,000",
    ],
)
def test_nothing_but_numbers_and_operators_is_read(expression: str) -> None:
    with pytest.raises(ArithmeticInputError, match="unexpected"):
        calculate(expression)


@pytest.mark.parametrize(
    "expression",
    ["9**9**9**9", "2**99999999999999999999", "(-1)**99999999999", "((10**999)**999)**999", "(" * 250 + "1"],
)
def test_huge_powers_and_deep_nesting_end_at_once(expression: str) -> None:
    started = time.process_time()
    with pytest.raises(ArithmeticInputError):
        calculate(expression)

    assert time.process_time() - started < 0.1 * slowness()
