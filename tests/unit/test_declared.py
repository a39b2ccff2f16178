"""The uses of ``locked()`` that are known."""

from __future__ import annotations

import gc
import importlib
import sys
import sysconfig
from pathlib import Path

import pytest

from django_redis_lock.decorators import LockedFunction, declarations

#: Python 3.13 without the GIL keeps the functions of a module forever, once a thread has started.
IMMORTAL = sys.version_info < (3, 14) and bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
#: Modules of other tests have such names, too.
pytestmark = pytest.mark.usefixtures("nothing_is_declared")


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.delitem(sys.modules, "shop", raising=False)
    return tmp_path / "shop.py"


def declared() -> list[LockedFunction]:
    gc.collect()
    return [d for d in declarations() if d.target.startswith("shop.")]


SOURCE = """
from django_redis_lock import locked

@locked("invoice-{pk}", using="locks", timeout=5)
def send(request, pk): ...

@locked
def clean(): ...

@locked(key=lambda name: name)
def build(name): ...

@locked(["from-{pk}", "to-{pk}"])
def move(pk): ...
"""


def test_what_is_declared(module: Path) -> None:
    module.write_text(SOURCE)
    importlib.import_module("shop")
    build, clean, move, send = declared()
    assert (move.template, move.name) == ("from-{pk}, to-{pk}", "from-{pk}, to-{pk}")
    assert (send.target, send.template, send.using) == ("shop.send", "invoice-{pk}", "locks")
    assert send.options.timeout == 5
    assert "timeout" not in clean.options.given()
    assert (clean.template, clean.name) == ("shop.clean", "shop.clean")
    assert (build.template, build.name) == (None, "shop.build")
    del sys.modules["shop"], build, clean, move, send
    assert IMMORTAL or not declared()


def test_a_module_that_is_reloaded_leaves_nothing_behind(module: Path) -> None:
    module.write_text(SOURCE)
    shop = importlib.import_module("shop")
    module.write_text(SOURCE.replace("invoice-", "bill-"))
    importlib.invalidate_caches()
    importlib.reload(shop)
    assert [d.template for d in declared() if d.target == "shop.send"] == ["bill-{pk}"]
