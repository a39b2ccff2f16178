"""What is written beside a lock about its holder, and read from there."""

from __future__ import annotations

import os
import pickle
import threading
from dataclasses import FrozenInstanceError

import pytest

from django_redis_lock.protocol import named_token
from django_redis_lock.protocol.holders import HolderInfo, Owner
from django_redis_lock.protocol.identity import fingerprint, hostname

OWNER = Owner("c0ffee", "web-1", 4711, "MainThread", "nightly report", 1_750_000_000.25)


def written(owner: Owner) -> dict[str, str]:
    """The hash in Redis that describes ``owner``, who holds a lock."""
    fields = owner.fields()
    since = {} if owner.since is None else {"fence": str(round(owner.since * 1e6))}
    return dict(zip(fields[::2], fields[1::2], strict=True)) | since


@pytest.mark.parametrize(
    "owner",
    [
        OWNER,
        Owner("c0ffee"),
        Owner("c0ffee", "web-1", 1, "", "", 0.5),
        Owner("c0ffee", "web-1", 1, "", "", 0.5, doing="GET /report/ (request 4f1c)"),
        Owner("c0ffee", "wéb", 1, "Thread-1 (run)", "two\nlines, {braces}: ü", 1.5),
    ],
    ids=str,
)
def test_an_owner_survives_redis(owner: Owner) -> None:
    assert all(isinstance(field, str) for field in owner.fields())
    assert Owner.from_fields(written(owner), "c0ffee") == owner


def test_what_describes_an_earlier_holder_is_not_believed() -> None:
    assert Owner.from_fields(written(OWNER), "another") == Owner("another")
    assert Owner.from_fields({}, "another") == Owner("another")


@pytest.mark.parametrize(
    "spoilt",
    [
        {"pid": ""},
        {"pid": "-1"},
        {"pid": "x"},
        {"pid": "²"},
        {"since": ""},
        {"since": "yesterday"},
        {"since": "nan"},
        {"since": "inf"},
        {"fence": ""},
        {"fence": "-7"},
        {"fence": "9" * 5000},
    ],
    ids=str,
)
def test_a_spoilt_field_costs_no_more_than_itself(spoilt: dict[str, str]) -> None:
    found = Owner.from_fields(written(OWNER) | spoilt, "c0ffee")
    assert (found.id, found.host, found.label) == ("c0ffee", "web-1", "nightly report")
    assert found.pid == (0 if "pid" in spoilt else 4711)
    assert found.since == (OWNER.since if "pid" in spoilt else None)


def test_as_a_text() -> None:
    assert str(OWNER) == "web-1, process 4711, thread MainThread (nightly report)"
    assert str(Owner("c0ffee", "web-1", 4711, "t")) == "web-1, process 4711, thread t"
    assert str(Owner("c0ffee")) == "an unnamed holder (c0ffee)"


def test_an_owner_is_a_value() -> None:
    assert {OWNER, pickle.loads(pickle.dumps(OWNER))} == {OWNER}
    with pytest.raises(FrozenInstanceError):
        OWNER.host = "web-2"


def test_the_id_says_nothing_of_the_token() -> None:
    token = b"5f3a" * 8
    assert fingerprint(token) == fingerprint(token) != fingerprint(token + b"x")
    assert len(fingerprint(token)) == 8
    assert fingerprint(token) not in token.decode()


# -- the owner that a token names --------------------------------------------------------------


def test_a_token_names_process_and_thread() -> None:
    owner = Owner.from_token(token := named_token())
    assert owner is not None
    assert (owner.host, owner.pid) == (hostname(), os.getpid())
    assert owner.thread == threading.current_thread().name
    assert owner.id == fingerprint(token)
    assert token.decode().partition(" ")[0] not in repr(owner)


@pytest.mark.parametrize(
    "token",
    [b"0a" * 16, b"", b"chosen 17 web-1 Thread-1", b"\xff", b"0a" * 16 + b" 17 web-1"],
)
def test_other_tokens_name_no_holder(token: bytes) -> None:
    assert Owner.from_token(token) is None
    owner = Owner(fingerprint(token))
    assert HolderInfo([token, 1000, [], 0]).in_the_way == owner


def test_a_description_comes_before_the_token() -> None:
    token = named_token()
    described = Owner(fingerprint(token), "web-1", 7, "MainThread", "report").fields()
    assert HolderInfo([token, 1000, described, 0]).in_the_way.label == "report"
    assert HolderInfo([token, 1000, [], 0]).in_the_way == Owner.from_token(token)
    assert HolderInfo([token, 1000, [], 0]).owner == Owner(fingerprint(token))


def test_a_forked_child_is_named_as_such() -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.write(writing, named_token())
        os._exit(0)
    os.waitpid(pid, 0)
    owner = Owner.from_token(os.read(reading, 1000))
    assert owner is not None
    assert owner.pid == pid
    os.close(reading)
    os.close(writing)


def test_a_holder_in_a_debugger() -> None:
    token = named_token()
    shown = repr(HolderInfo([token, 29_340, [], 1_000_000]))
    here = f"{hostname()}, process {os.getpid()}, thread MainThread"
    assert shown == f"<HolderInfo: {here}, ttl=29.3, held_for=None>"
    assert token.decode()[:32] not in shown
    described = HolderInfo([b"token", -1, ["id", fingerprint(b"token"), "since", "1"], 3_500_000])
    assert repr(described).endswith(", ttl=inf, held_for=2.5>")
