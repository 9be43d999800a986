"""The calculator that an answer may call, between <|python_start|> and <|python_end|>, as in nanochat."""

import ast
import operator
import warnings

OPERATORS = {
    **{ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul},
    **{ast.Div: operator.truediv, ast.FloorDiv: operator.floordiv},
    **{ast.UAdd: operator.pos, ast.USub: operator.neg},
}
ARITHMETIC = set("0123456789*+-/.() ")


def calculate(expression: str) -> str | None:
    """Return the result of an expression of numbers and + - * / // ( ), or of `.count` on texts, as in
    `'strawberry'.count('r')`. Commas, as in 1,000, are removed. Return None for anything else. Nothing is executed."""
    expression = expression.replace(",", "").strip()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a text with an unknown escape
            body = ast.parse(expression, mode="eval").body
        return str(_number(body) if set(expression) <= ARITHMETIC else _count(body))
    except (ValueError, SyntaxError, ArithmeticError, RecursionError, MemoryError):
        return None


def _number(node: ast.expr) -> int | float:
    match node:
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.UnaryOp(op=op, operand=operand) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(operand))
        case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
            return OPERATORS[type(op)](_number(left), _number(right))
    raise ValueError(f"{type(node).__name__} is no arithmetic")


def _count(node: ast.expr) -> int:
    match node:
        case ast.Call(
            func=ast.Attribute(value=ast.Constant(value=str() as text), attr="count"),
            args=[ast.Constant(value=str() as part)],
            keywords=[],
        ):
            return text.count(part)
    raise ValueError("only .count is known")
