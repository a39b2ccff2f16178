"""How calls are written down for Redis, and what stays in memory of them."""

from __future__ import annotations

import gc
import tracemalloc
from enum import IntEnum
from typing import Any

import pytest

from django_redis_lock.protocol.script import Call, script
from django_redis_lock.transport.execute import pack, pack_all

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
