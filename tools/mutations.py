"""Small wrong changes of a Python module, each of which its tests should notice."""

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

_OPERATORS: Mapping[type[ast.operator], tuple[type[ast.operator], ...]] = {
    ast.Add: (ast.Sub,),
    ast.Sub: (ast.Add,),
    ast.Mult: (ast.FloorDiv, ast.Add),
    ast.Div: (ast.Mult, ast.FloorDiv),
    ast.FloorDiv: (ast.Mult, ast.Div),
    ast.Mod: (ast.FloorDiv,),
    ast.Pow: (ast.Mult,),
    ast.BitAnd: (ast.BitOr,),
    ast.BitOr: (ast.BitAnd,),
}
_COMPARISONS: Mapping[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.Gt),
    ast.LtE: (ast.Lt, ast.GtE),
    ast.Gt: (ast.GtE, ast.Lt),
    ast.GtE: (ast.Gt, ast.LtE),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
_OPPOSITES = {"min": "max", "minimum": "maximum", "argmin": "argmax", "any": "all", "floor": "ceil"}
_CALLS = {**_OPPOSITES, **{other: one for one, other in _OPPOSITES.items()}}
_SEQUENCES = (ast.List, ast.Tuple, ast.JoinedStr, ast.ListComp)
_LARGE = 16
"""Whole numbers from here are doubled or halved: one more or less seldom shows."""
_KEYWORDS_LEFT_OUT = ("strict", "copy", "axis")
"""Keyword arguments without an effect on correct results, and one that changes with its call."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mutant:
    """One change of one expression of a module."""

    path: str
    """Of the module, from the root of the repository."""
    line: int
    """Counted from 1."""
    function: str
    """Qualified name of the outermost function that holds the expression."""
    start: int
    """Bytes of the module before the expression."""
    before: str
    after: str

    def applied(self, source: str) -> str:
        """Text of the module with this change."""
        text, end = source.encode(), self.start + len(self.before.encode())
        return (text[: self.start] + self.after.encode() + text[end:]).decode()

    @property
    def change(self) -> str:
        """The change on one line."""
        return " ".join(f"{self.before}  ->  {self.after}".split())


def mutants_by_place(path: str, source: str) -> list[list[Mutant]]:
    """Mutants of a module's functions, grouped by the expression that they change, in the order of
    the text.

    What is only said in messages is left out.
    """
    text = source.encode()
    line_starts = [0]
    for line in text.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    places = []
    for function, definition in _functions(ast.parse(source).body):
        for node, changes in _changes_below(definition):
            start = line_starts[node.lineno - 1] + node.col_offset
            end = line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
            before = text[start:end].decode()
            place = [
                Mutant(
                    path=path,
                    line=node.lineno,
                    function=function,
                    start=start,
                    before=before,
                    after=f"({ast.unparse(new)})"
                    if isinstance(new, ast.expr)
                    else ast.unparse(new),
                )
                for new in changes
            ]
            places += [place] if place else []
    return sorted(places, key=lambda place: (place[0].start, -len(place[0].before)))


def functions_by_line(source: str) -> dict[int, str]:
    """Qualified name of the outermost function of each line that is in the body of one."""
    return {
        line: name
        for name, node in _functions(ast.parse(source).body)
        for line in range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
    }


def _functions(
    nodes: Iterable[ast.stmt], prefix: str = ""
) -> Iterator[tuple[str, ast.FunctionDef]]:
    for node in nodes:
        if isinstance(node, ast.ClassDef):
            yield from _functions(node.body, f"{prefix}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield prefix + node.name, node


def _changes_below(
    node: ast.AST,
) -> Iterator[tuple[ast.expr | ast.AugAssign, Iterable[ast.AST]]]:
    """Expressions with their changes, without those of messages and of checks of what holds."""
    below: Iterable[ast.AST | None] = ast.iter_child_nodes(node)
    match node:
        case ast.Raise() | ast.Assert() | ast.JoinedStr():
            return
        case ast.keyword(arg=name) if name in _KEYWORDS_LEFT_OUT:
            return
        case ast.FunctionDef(body=body):
            below = body
        case ast.match_case(guard=guard, body=body):
            below = (guard, *body)
        case ast.AnnAssign(value=value):
            below = (value,)
        case ast.If(test=test) | ast.IfExp(test=test):
            # Conditions that are no comparison are negated.
            if isinstance(test, ast.Name | ast.Attribute | ast.Call):
                yield test, [ast.UnaryOp(ast.Not(), test)]
    if isinstance(node, ast.expr | ast.AugAssign):
        yield node, _changes(node)
    for child in filter(None, below):
        yield from _changes_below(child)


def _changes(node: ast.expr | ast.AugAssign) -> Iterator[ast.expr | ast.AugAssign]:
    match node:
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.BinOp():
            yield from _of_operation(node)
        case ast.AugAssign():
            for operator in _OPERATORS.get(type(node.op), ()):
                yield ast.AugAssign(node.target, operator(), node.value)
        case ast.Compare(ops=[operation]):
            for comparison in _COMPARISONS[type(operation)]:
                yield ast.Compare(node.left, [comparison()], node.comparators)
        case ast.BoolOp():
            yield from _of_conditions(node)
        case ast.Constant(value=value):
            yield from map(ast.Constant, _of_constant(value))
        case ast.Call():
            yield from _of_call(node)


def _of_conditions(node: ast.BoolOp) -> Iterator[ast.expr]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for at in range(len(node.values)):
        rest = node.values[:at] + node.values[at + 1 :]
        yield ast.BoolOp(node.op, rest) if len(rest) > 1 else rest[0]


def _of_operation(node: ast.BinOp) -> Iterator[ast.expr]:
    sides = (node.left, node.right)
    texts = any(isinstance(side, ast.Constant) and isinstance(side.value, str) for side in sides)
    if texts or any(isinstance(side, _SEQUENCES) for side in sides):
        return
    if isinstance(node.left, ast.Constant) and node.left.value == 0:
        # `0 * tokens`, a vector of zeros, is 0 whatever the operator.
        return
    for operator in _OPERATORS.get(type(node.op), ()):
        yield ast.BinOp(node.left, operator(), node.right)
    if isinstance(node.op, ast.Add | ast.Sub | ast.Mult | ast.Div):
        yield node.left
    if isinstance(node.op, ast.Add | ast.Mult):
        yield node.right


def _of_constant(value: object) -> Iterator[float]:
    if isinstance(value, bool):
        yield not value
    elif isinstance(value, int) and value < _LARGE:
        yield from (value + 1, value - 1)
    elif isinstance(value, int | float):
        yield from (value * 2, type(value)(value / 2)) if value else (1.0,)


def _of_call(node: ast.Call) -> Iterator[ast.expr]:
    match node.func:
        case ast.Name(id=name) if name in _CALLS:
            yield ast.Call(ast.Name(_CALLS[name]), node.args, node.keywords)
        case ast.Attribute(value=value, attr=name) if name in _CALLS:
            yield ast.Call(ast.Attribute(value, _CALLS[name]), node.args, node.keywords)
    for at, keyword in enumerate(node.keywords):
        if keyword.arg == "axis" and isinstance(keyword.value, ast.Constant):
            # The other axis of a matrix.
            axis = ast.Constant(1 if keyword.value.value == 0 else 0)
            others = node.keywords[:at] + node.keywords[at + 1 :]
            yield ast.Call(node.func, node.args, [*others, ast.keyword("axis", axis)])
