"""How much stands in the package twice, for threads and for tasks: ``python -m benchmarks.twins``.

Each asynchronous function is compared with the synchronous functions of its name, with or without
a leading ``a``; the lines of its body that stand word for word in the most similar one are counted.
Comments, docstrings and empty lines do not count.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from difflib import SequenceMatcher
from pathlib import Path

__all__ = ["main", "repeated_lines"]

PACKAGE = Path(__file__).resolve().parent.parent / "django_redis_lock"
Function = ast.FunctionDef | ast.AsyncFunctionDef


def repeated_lines(package: Path = PACKAGE) -> dict[str, int]:
    """For each asynchronous function, by file and name: its lines that its twin has, too."""
    twins: dict[str, list[list[str]]] = defaultdict(list)
    found: list[tuple[str, str, list[str]]] = []
    for path, function, lines in _functions(package):
        if isinstance(function, ast.FunctionDef):
            twins[function.name].append(lines)
        else:
            found.append((str(path.relative_to(package)), function.name, lines))
    return {
        f"{path} · {name}": max(
            (_common(lines, twin) for other in _names(name) for twin in twins[other]), default=0
        )
        for path, name, lines in found
    }


def _functions(package: Path) -> Iterator[tuple[Path, Function, list[str]]]:
    for path in sorted(package.rglob("*.py")):
        source = path.read_text()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Function):
                yield path, node, _body(node, source.splitlines())


def _body(function: Function, source: list[str]) -> list[str]:
    first = 1 if ast.get_docstring(function) is not None else 0
    statements = function.body[first:]
    if not statements:
        return []
    lines = (line.strip() for line in source[statements[0].lineno - 1 : function.end_lineno])
    return [line for line in lines if line and not line.startswith("#")]


def _names(name: str) -> Iterator[str]:
    """The names that the synchronous twin of ``name`` may have."""
    yield name
    for prefix in ("a", "_a", "__a"):
        if name.startswith(prefix):
            yield prefix[:-1] + name.removeprefix(prefix)


def _common(one: list[str], other: list[str]) -> int:
    blocks = SequenceMatcher(None, one, other, autojunk=False).get_matching_blocks()
    return sum(block.size for block in blocks)


def main() -> None:
    found = repeated_lines()
    for name, lines in sorted(found.items(), key=lambda item: -item[1]):
        if lines:
            print(f"{lines:4} {name}")
    print(f"{sum(found.values()):4} in all")


if __name__ == "__main__":
    main()
