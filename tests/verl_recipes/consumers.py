"""What reads a key of a run's configuration, and what a test is about, by their syntax trees: never by text alone.

The product reads a key as an attribute of a settings object, which is known by its section's name (`rollout.n`), by a
variable that was assigned from it, or by a parameter of its type; by `getattr` with a name that the module has as a
string; or by `model_dump` of the section. A validator is no reader.
"""

import ast
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import get_args

from trackway.run_config import RunConfig
from trackway.run_config.section import Section

Reads = set[tuple[str, str]]
"""Of each read, the name of a section or of its class, and that of the field."""


def is_read(key: str, reads: Reads) -> bool:
    """Whether a dotted key of the configuration is read."""
    section, owner = RunConfig, ""
    *path, name = key.split(".")
    for owner in path:
        annotation = section.model_fields[owner].annotation
        section = next(kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type))
    owners = {owner, *(base.__name__ for base in section.__mro__ if issubclass(base, Section))}
    return any((known, read) in reads for known in owners for read in (name, "model_dump"))


def reads_of(source: str) -> Reads:
    """What a module reads."""
    nodes = [*_code(ast.parse(source))]
    names, strings = _names(nodes), _strings(nodes)
    reads = Reads()
    for node in nodes:
        match node:
            case ast.Attribute(value=subject, attr=name, ctx=ast.Load()):
                reads |= {(owner, name) for owner in _owners(subject, names)}
            case ast.Call(func=ast.Name(id="getattr"), args=[subject, *_]):
                reads |= {(owner, name) for owner in _owners(subject, names) for name in strings}
            case ast.ClassDef(name=owner):
                own = [part for part in _code(node) if isinstance(part, ast.Attribute)]
                reads |= {(owner, part.attr) for part in own if _last(part.value) == "self"}
            case _:
                pass
    return reads


def unparsed(source: str) -> str:
    """A module's code without its comments and text, in one spelling."""
    module = ast.parse(source)
    for node in ast.walk(module):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            node.value = ast.Constant(...)
    return ast.unparse(module)


def names_in_test(source: str, test: str, word: str) -> bool:
    """Whether a test function, or what it uses of its module, has the word as a name or within a string."""
    module = ast.parse(source)
    parts = {name: node for node in module.body for name in _defined(node)}
    used, waiting = set[str](), [test]
    while waiting:
        name = waiting.pop()
        if name in used or name not in parts:
            continue
        used.add(name)
        nodes = [*_code(parts[name])]
        found = {_last(node) for node in nodes} | {node.arg for node in nodes if isinstance(node, ast.arg)}
        keywords = {str(node.arg) for node in nodes if isinstance(node, ast.keyword)}
        if word in found | keywords or any(re.search(rf"\b{word}\b", text) for text in _strings(nodes)):
            return True
        waiting += found
    return False


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [_last(target) for target in targets]


def _code(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes below one, without validators and text that stands by itself."""
    for child in ast.iter_child_nodes(tree):
        text = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        decorators = child.decorator_list if isinstance(child, ast.FunctionDef) else []
        if text or any("validator" in ast.unparse(decorator) for decorator in decorators):
            continue
        yield child
        yield from _code(child)


def _names(nodes: Iterable[ast.AST]) -> dict[str, set[str]]:
    """Variable or parameter -> the attributes that it was assigned from, and the types that it has."""
    names: dict[str, set[str]] = defaultdict(set)
    for node in nodes:
        pairs: list[tuple[ast.expr, ast.expr]] = []
        match node:
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                pairs = [*zip(targets, values, strict=False)]
            case ast.Assign(targets=[target], value=value) | ast.NamedExpr(target=target, value=value):
                pairs = [(target, value)]
            case (
                ast.arg(arg=name, annotation=ast.expr() as kind)
                | ast.AnnAssign(target=ast.Name(id=name), annotation=kind)
            ):
                names[name] |= {part.id for part in ast.walk(kind) if isinstance(part, ast.Name)}
            case _:
                pass
        for target, value in pairs:
            if isinstance(value, ast.Attribute):
                names[_last(target)].add(value.attr)
    return names


def _owners(subject: ast.expr, names: dict[str, set[str]]) -> set[str]:
    return {_last(subject), *names.get(_last(subject), ())} - {""}


def _last(node: ast.AST) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _strings(nodes: Iterable[ast.AST]) -> set[str]:
    return {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
