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
_TERMS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
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
_OPPOSITES = (
    *(("min", "max"), ("minimum", "maximum"), ("argmin", "argmax")),
    *(("any", "all"), ("floor", "ceil")),
)
_CALLS = {a: b for pair in _OPPOSITES for a, b in (pair, pair[::-1])}
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
    places = _Places(path, source)
    places.visit(ast.parse(source))
    return sorted(places.found, key=lambda place: (place[0].start, -len(place[0].before)))


def functions_by_line(source: str) -> dict[int, str]:
    """Qualified name of the outermost function of each line that is in the body of one."""
    found: dict[int, str] = {}

    def walk(nodes: list[ast.stmt], prefix: str) -> None:
        for node in nodes:
            if isinstance(node, ast.ClassDef):
                walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, ast.FunctionDef):
                lines = range(node.body[0].lineno, (node.end_lineno or node.lineno) + 1)
                found.update(dict.fromkeys(lines, prefix + node.name))

    walk(ast.parse(source).body, "")
    return found


class _Places(ast.NodeVisitor):
    def __init__(self, path: str, source: str) -> None:
        self.found: list[list[Mutant]] = []
        self._path, self._text = path, source.encode()
        self._line_starts = [0]
        for line in self._text.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self._classes: tuple[str, ...] = ()
        self._function = ""

    def generic_visit(self, node: ast.AST) -> None:
        if self._function and isinstance(node, ast.expr | ast.AugAssign):
            self._add(node, _changes(node))
        super().generic_visit(node)

    def _add(self, node: ast.expr | ast.AugAssign, changes: Iterable[ast.AST]) -> None:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        before = self._text[start:end].decode()
        changed = [
            Mutant(
                path=self._path,
                line=node.lineno,
                function=self._function,
                start=start,
                before=before,
                after=ast.unparse(new) if isinstance(new, ast.stmt) else f"({ast.unparse(new)})",
            )
            for new in changes
        ]
        if changed:
            self.found.append(changed)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        self._classes += (node.name,)
        self._visit_all(node.body)
        self._classes = self._classes[:-1]

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer = self._function
        self._function = outer or ".".join((*self._classes, node.name))
        self._visit_all(node.body)
        self._function = outer

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self._visit_all([node.value])

    def visit_If(self, node: ast.If) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self._condition(node.test)
        self.generic_visit(node)

    def _condition(self, test: ast.expr) -> None:
        """Conditions that are no comparison are negated."""
        if isinstance(test, ast.Name | ast.Attribute | ast.Call):
            self._add(test, [ast.UnaryOp(ast.Not(), test)])

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in _KEYWORDS_LEFT_OUT:
            self.visit(node.value)

    def visit_match_case(self, node: ast.match_case) -> None:
        self._visit_all([node.guard, *node.body])

    def visit_Raise(self, node: ast.Raise) -> None:
        """Messages are left as they are."""

    def visit_Assert(self, node: ast.Assert) -> None:
        """A check of what holds anyway."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        """Its parts have no places of their own."""

    def _visit_all(self, nodes: list) -> None:
        for node in nodes:
            if node is not None:
                self.visit(node)


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
        case ast.Constant():
            yield from map(ast.Constant, _of_constant(node.value))
        case ast.Call():
            yield from _of_call(node)


def _of_conditions(node: ast.BoolOp) -> Iterator[ast.expr]:
    yield ast.BoolOp(ast.Or() if isinstance(node.op, ast.And) else ast.And(), node.values)
    for left_out in range(len(node.values)):
        rest = node.values[:left_out] + node.values[left_out + 1 :]
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
    if isinstance(node.op, _TERMS):
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
    function: ast.expr
    match node.func:
        case ast.Name(id=name) if name in _CALLS:
            function = ast.Name(_CALLS[name])
        case ast.Attribute(value=value, attr=name) if name in _CALLS:
            function = ast.Attribute(value, _CALLS[name])
        case _:
            function = node.func
    if function is not node.func:
        yield ast.Call(function, node.args, node.keywords)
    for at, keyword in enumerate(node.keywords):
        if keyword.arg == "axis" and isinstance(keyword.value, ast.Constant):
            # The other axis of a matrix.
            axis = ast.Constant(1 if keyword.value.value == 0 else 0)
            others = node.keywords[:at] + node.keywords[at + 1 :]
            yield ast.Call(node.func, node.args, [*others, ast.keyword("axis", axis)])
