"""Sources as syntax trees, for tests of the code itself; a process reads and walks each once."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

__all__ = ["nodes", "tree"]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(of: ast.AST) -> tuple[ast.AST, ...]:
    """The node and all below it."""
    return tuple(ast.walk(of))
