"""The code of README and the pages passes mypy, strict, and pyright, as that of a project which
follows them. Its functions have no annotations; what a block does not define can be anything."""

from __future__ import annotations

import ast
import builtins
import importlib.util
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import django_redis_lock
from tests.unit.test_docs_pages import PAGES, ROOT

BLOCK = re.compile(r"^( *)```python\n(.*?)^ *```$", re.DOTALL | re.MULTILINE)
#: What is the reader's: functions without annotations, packages without types, or not installed,
#: and what a plugin knows of models.
OF_THE_READER = (
    *("no-untyped-def", "no-untyped-call", "untyped-decorator", "var-annotated"),
    *("import-untyped", "import-not-found"),
)
#: Pages use these without a word.
OURS = {name: f"from django_redis_lock import {name}" for name in django_redis_lock.__all__}
OURS |= {"cache": "from django_redis_lock.cache import cache"}
NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.ExceptHandler)
pytestmark = [pytest.mark.slow, pytest.mark.sample(0)]


def program(code: str, imports: dict[str, str]) -> str:
    """``code``, with a declaration of each name that it uses and does not define: an import of an
    earlier block of the page (``imports``, which is completed), or something of any type."""
    code = re.sub(r"^from \.\S* import .*\n", "", code, flags=re.MULTILINE)
    tree = compile(code, "", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    nodes = list(ast.walk(tree))
    added_to = [n.target for n in nodes if isinstance(n, ast.AugAssign)]
    used, defined = set[str](), set[str]()
    for node in nodes:
        if isinstance(node, ast.Name):
            stored = isinstance(node.ctx, ast.Store) and node not in added_to
            (defined if stored else used).add(node.id)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, NAMED) and node.name:
            defined.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                name = alias.asname or alias.name.partition(".")[0]
                defined.add(name)
                imports[name] = ast.unparse(node)
    missing = sorted(used - defined - set(dir(builtins)))
    declared = [imports.get(name, f"{name}: Any = ...") for name in missing]
    if any(isinstance(n, ast.Await) for n in tree.body for n in ast.walk(n)) and not any(
        isinstance(n, ast.AsyncFunctionDef) for n in nodes
    ):
        code = "async def block():\n" + textwrap.indent(code, "    ")
    return "\n".join(("from typing import Any", *dict.fromkeys(declared), code))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One module for each block, named by its page and line."""
    folder = tmp_path_factory.mktemp("blocks")
    for page in PAGES:
        text, imports = page.read_text(), dict(OURS)
        for found in BLOCK.finditer(text):
            line = text[: found.start()].count("\n") + 2
            if "django_tenants" in found[2]:
                continue  # It gives Django's connections another attribute.
            module = folder / f"{page.stem.lower()}_line_{line}.py"
            module.write_text(program(textwrap.dedent(found[2]), imports))
    assert len(list(folder.iterdir())) > 80
    return folder


def errors_of(checker: str, *args: str) -> str:
    if not importlib.util.find_spec(checker):
        pytest.skip(f"{checker} is of the extra lint")
    command = [sys.executable, "-m", checker, *args]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode in (0, 1), done.stderr
    return done.stdout


def test_mypy(folder: Path) -> None:
    ignored = [f"--disable-error-code={code}" for code in OF_THE_READER]
    # Of what a block imports, its own check tells.
    options = ("--strict", "--no-error-summary", "--follow-imports=silent")
    found = errors_of("mypy", *options, *ignored, str(folder))
    # The base class is of a package that is not installed.
    wrong = [line for line in found.splitlines() if "Class cannot subclass" not in line]
    assert [line.rpartition("/")[2] for line in wrong] == []


def test_pyright(folder: Path) -> None:
    settings = {
        "include": [str(folder)],
        "extraPaths": [str(ROOT)],
        "reportMissingImports": False,
        "reportMissingModuleSource": False,
    }
    config = folder.with_name("pyrightconfig.json")
    config.write_text(json.dumps(settings))
    found = json.loads(
        errors_of("pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(config))
    )
    wrong = [
        f"{Path(each['file']).name}:{each['range']['start']['line'] + 1}: {each['message']}"
        for each in found["generalDiagnostics"]
    ]
    assert found["summary"]["filesAnalyzed"] == len(list(folder.iterdir()))
    assert wrong == []
