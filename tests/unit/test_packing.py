"""How calls are written down for Redis, and what stays in memory of them."""

from __future__ import annotations

import gc
import importlib
import re
import tracemalloc
from enum import IntEnum
from typing import Any

import pytest

from django_redis_lock.protocol.script import Call, Script, script
from django_redis_lock.transport.server import pack, pack_all

ECHO = script("return ARGV[1]")


class Colour(IntEnum):
    RED = 1


@pytest.mark.parametrize(
    ("arg", "written"),
    [
        (b"\x00\xff", b"\x00\xff"),
        (memoryview(b"view"), b"view"),
        (memoryview(b"12345678").cast("Q"), b"12345678"),
        (bytearray(b"array"), b"array"),
        ("ключ", "ключ".encode()),
        (0, b"0"),
        (-7, b"-7"),
        (2**70, b"%d" % 2**70),
        (True, b"1"),
        (Colour.RED, b"1"),
    ],
    ids=lambda value: value.hex() if isinstance(value, bytes) else type(value).__name__,
)
def test_an_argument_is_written_as_redis_reads_it(arg: Any, written: bytes) -> None:
    assert pack(Call(ECHO, (), (arg,))).endswith(b"\r\n$%d\r\n%b\r\n" % (len(written), written))


@pytest.mark.parametrize("form", [bytes, memoryview, bytearray, bytes.decode])
def test_no_argument_is_kept(form: Any) -> None:
    """Not even one of each size: values may be large."""
    pack_all([Call(ECHO, (b"key",), (form(b"warm"),))])
    gc.collect()
    tracemalloc.start()
    try:
        for n in range(20):
            pack_all([Call(ECHO, (b"key",), (form(b"%d" % n * 500_000),))])
        assert tracemalloc.get_traced_memory()[0] < 400_000
    finally:
        tracemalloc.stop()


MODULES_WITH_SCRIPTS = [
    f"django_redis_lock.{name}"
    for name in (
        *("protocol.lock_scripts", "protocol.holder_scripts", "singleflight.scripts"),
        *("contrib.limit", "contrib.redlock.votes", "ops.inventory.scripts"),
    )
]


def test_a_script_brings_the_functions_that_it_calls_and_no_others() -> None:
    """Redis makes them anew for each call."""
    modules = [importlib.import_module(name) for name in MODULES_WITH_SCRIPTS]
    scripts = [each for m in modules for each in vars(m).values() if isinstance(each, Script)]
    assert len(scripts) > 40
    for each in scripts:
        called = set(re.findall(r"(?<!function )(?<![.\w])(\w+)\(", each.source))
        for names, functions in each._library:
            needed = any(name.rstrip("(") in called for name in names)
            assert each.source.count(functions) == int(needed), names
