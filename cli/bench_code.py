"""Which code decides a cell's result, as one hash: a change anywhere else leaves finished cells valid.

Sources are compared as syntax trees without docstrings, so a comment or a line break changes nothing. Never runs a cell.
"""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator
from functools import cache
from importlib.resources import files

from fluidpd.benchmark.cells import Cell, Task

_REGISTRY = "fluidpd.simulator.policies"
_NOBODY_DECIDES = ("static", "static_tuned", "colocated_prefill_first", "colocated_chunked")
# Only a run in which somebody decides passes through these.
_DECIDING = ("control", "moving", "lending", "terms", "readout")
_DECIDING_MODULES = (*(f"fluidpd.simulator.{m}" for m in _DECIDING), "fluidpd.indices", "fluidpd.decision", "fluidpd.transition")
_MEASURED_BY = {Task.RUN: ("cells", "watch", "bootstrap"), Task.GOODPUT: ("cells", "goodput", "factor")}
_BOUND_BY = ("cells", "bound")


def code_version(cell: Cell) -> str:
    """Sixteen hexadecimal digits."""
    return _version(cell.task, cell.policy)


@cache
def _version(task: Task, policy: str) -> str:
    seen = hashlib.sha256()
    for name in _BOUND_BY if task is Task.BOUND else _MEASURED_BY[task]:
        seen.update(_shape(f"fluidpd.benchmark.{name}").encode())
    if task is Task.BOUND:
        seen.update(_shape("fluidpd.cost").encode())
        return seen.hexdigest()[:16]
    entry, modules = _entry(policy)
    seen.update(entry.encode())
    for module in sorted(_closure(modules, policy)):
        seen.update(f"{module}:{_shape(module)}".encode())
    return seen.hexdigest()[:16]


def _entry(policy: str) -> tuple[str, set[str]]:
    """What the registry says of one policy: its own definitions there, and the modules they name."""
    tree = _tree(_REGISTRY)
    defined: dict[str, ast.AST] = {}
    imported: dict[str, str] = {}
    entry: ast.AST | None = None
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined[node.name] = node
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {alias.asname or alias.name: node.module for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for name in (t.id for t in targets if isinstance(t, ast.Name)):
                defined[name] = node.value
            if isinstance(node.value, ast.Dict):
                entry = _value_of(node.value, policy) or entry
    if entry is None:
        return ast.dump(tree), set(imported.values())
    parts, modules, met = [ast.dump(entry)], set[str](), {"POLICIES"}
    waiting = [entry]
    while waiting:
        for name in (n.id for n in ast.walk(waiting.pop()) if isinstance(n, ast.Name) and n.id not in met):
            met.add(name)
            if name in imported:
                modules.add(imported[name])
            elif name in defined:
                parts.append(ast.dump(defined[name]))
                waiting.append(defined[name])
    return "\n".join(sorted(parts)), modules


def _value_of(mapping: ast.Dict, key: str) -> ast.AST | None:
    for k, value in zip(mapping.keys, mapping.values, strict=True):
        if isinstance(k, ast.Constant) and k.value == key:
            return value
    return None


def _closure(modules: set[str], policy: str) -> set[str]:
    """The modules of FluidPD that these import, directly or not."""
    found: set[str] = set()
    waiting = set(modules)
    while waiting:
        module = waiting.pop()
        if module in found or not module.startswith("fluidpd.") or module == _REGISTRY or _skipped(module, policy):
            continue
        found.add(module)
        waiting |= set(_imports(module))
    return found


def _skipped(module: str, policy: str) -> bool:
    """Modules that a run of this policy only imports."""
    return policy in _NOBODY_DECIDES and (module in _DECIDING_MODULES or module.startswith("fluidpd.policy"))


@cache
def _imports(module: str) -> tuple[str, ...]:
    return tuple(_named(_tree(module)))


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module
            for alias in node.names:  # `from fluidpd.simulator import check` names a module
                if node.module.startswith("fluidpd") and _source(f"{node.module}.{alias.name}") is not None:
                    yield f"{node.module}.{alias.name}"


@cache
def _shape(module: str) -> str:
    return ast.dump(_tree(module))


@cache
def _tree(module: str) -> ast.Module:
    return without_docstrings(_source(module) or "")


def without_docstrings(source: str) -> ast.Module:
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
                node.body = node.body[1:]
    return tree


@cache
def _source(module: str) -> str | None:
    path = files("fluidpd")
    parts = module.split(".")[1:]
    for part in parts:
        path = path.joinpath(part)
    for candidate in (path.joinpath("__init__.py"), files("fluidpd").joinpath("/".join(parts) + ".py")):
        if candidate.is_file():
            return candidate.read_text(encoding="utf-8")
    return None
