"""Sources as syntax trees, for tests of the code itself; a process reads and walks each once."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

__all__ = ["nodes", "tree"]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def nodes(of: ast.AST) -> tuple[ast.AST, ...]:
    """The node and all below it."""
    found = tuple(ast.walk(of))
    gc.freeze()  # They stay to the end: no search for garbage need look at them.
    return found
