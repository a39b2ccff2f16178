"""Locks of this host: between threads, after a fork, and what is left of them."""

from __future__ import annotations

import errno
import hashlib
import math
import os
import socket
import stat
import threading
import time
from pathlib import Path

import pytest

from django_redis_lock import LockError
from django_redis_lock.contrib.fallback import file_lock
from django_redis_lock.contrib.fallback.file_lock import (
    LocalLock,
    held_locally,
    local_folder,
    pauses,
    problem_of,
)
from django_redis_lock.protocol.holders import Owner
from tests.processes import in_threads
from tests.support.clock import clock

__all__ = ["clock"]

ME = Owner("abcd", "host", 42, "main", "a test", 1_700_000_000.0)


def lock(folder: Path, where: bytes = b"report") -> LocalLock:
    return LocalLock(where, "report", folder)


@pytest.mark.parametrize("deletes", [True, False])
def test_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deletes: bool) -> None:
    """Also if only the owner of a file may delete it, as in /tmp."""

    def refuse(path: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted", path)

    if not deletes:
        monkeypatch.setattr(os, "unlink", refuse)
    one, two = lock(tmp_path), lock(tmp_path)
    assert one.try_acquire(ME)
    assert not two.try_acquire(ME)
    two.release()
    assert not two.try_acquire(ME)
    assert lock(tmp_path, b"other").try_acquire(ME)
    one.release()
    assert two.try_acquire(ME)
    one.release()
    assert not lock(tmp_path).try_acquire(ME)
    two.release()


def test_it_says_who_has_it(tmp_path: Path) -> None:
    mine = lock(tmp_path)
    assert mine.holder() is None
    mine.try_acquire(ME)
    assert lock(tmp_path).holder() == ME
    assert held_locally(tmp_path) == [("report", ME)]
    others = [LocalLock(name.encode(), name, tmp_path) for name in ("z", "a")]
    assert all(other.try_acquire(ME) for other in others)
    assert held_locally(tmp_path) == [("a", ME), ("report", ME), ("z", ME)]
    for each in (mine, *others):
        each.release()
    assert lock(tmp_path).holder() is None
    assert held_locally(tmp_path) == []
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize(
    "text", [b"", b"{", b"[]", b"5", b"null", b"{}", b'{"name": 5, "fields": 5}']
)
def test_a_holder_that_has_not_described_itself_yet(tmp_path: Path, text: bytes) -> None:
    mine = lock(tmp_path)
    assert mine.try_acquire(ME)
    mine.path.write_bytes(text)
    name = mine.path.stem
    assert lock(tmp_path).holder() == Owner(name[:8])
    assert held_locally(tmp_path) == [(name, Owner(name[:8]))]
    assert not lock(tmp_path).is_in_addition()


@pytest.mark.parametrize("in_addition", [False, True])
@pytest.mark.parametrize("full", [False, True])
def test_whether_it_is_held_in_addition_to_that_in_redis(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_addition: bool, full: bool
) -> None:
    """Also on a full disk, which takes no description. What a process that was killed has left
    there does not count."""

    def no_room(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    mine = lock(tmp_path)
    assert not mine.is_in_addition()
    mine.path.write_bytes(b'{"in_addition": true}' * 100)
    if full:
        monkeypatch.setattr(os, "pwrite", no_room)
    assert mine.try_acquire(ME, in_addition)
    assert lock(tmp_path).is_in_addition() is in_addition
    assert lock(tmp_path).holder() == (Owner(mine.path.stem[:8]) if full else ME)
    mine.release()
    assert not lock(tmp_path).is_in_addition()


def test_processes_of_all_versions_have_the_same_file(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"report").hexdigest()[:40]
    assert lock(tmp_path).path == tmp_path / f"{digest}.lock"


def test_threads_exclude_each_other(tmp_path: Path) -> None:
    inside: list[int] = []

    def work() -> int:
        done = 0
        while done < 20:
            mine = lock(tmp_path)
            if mine.try_acquire(ME):
                inside.append(1)
                assert len(inside) == 1
                inside.pop()
                done += 1
                mine.release()
        return done

    assert in_threads(4, work) == [20] * 4


def test_a_forked_child_neither_ends_nor_keeps_it(tmp_path: Path) -> None:
    mine = lock(tmp_path)
    mine.try_acquire(ME)
    parent, childs = socket.socketpair()
    child = os.fork()
    if not child:
        mine.release()
        del mine
        childs.send(b"released")
        childs.recv(1)  # Until the parent is done.
        os._exit(0)
    try:
        parent.recv(100)
        assert not lock(tmp_path).try_acquire(ME)
        mine.release()
        assert lock(tmp_path).try_acquire(ME)
    finally:
        parent.send(b"!")
        os.waitpid(child, 0)


def test_a_look_does_not_get_in_the_way(tmp_path: Path) -> None:
    mine = lock(tmp_path)
    mine.try_acquire(ME)
    mine.release()
    lock(tmp_path).path.touch()
    stop = threading.Event()

    def look() -> None:
        while not stop.is_set():
            held_locally(tmp_path)

    looking = threading.Thread(target=look)
    looking.start()
    try:
        at_once = 0
        for _ in range(200):
            mine, tries = lock(tmp_path), 1
            while not mine.try_acquire(ME):
                assert tries < 1000
                time.sleep(0.001)
                tries += 1
            at_once += tries <= 1 + len([*pauses(-math.inf)])
            mine.release()
        assert at_once >= 100  # Nearly all, unless a busy machine stops the look while it reads.
    finally:
        stop.set()
        looking.join()


def test_the_folder_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(file_lock, "FOLDER", "locks-%d")
    found = local_folder()
    assert found.parent == tmp_path
    assert stat.S_IMODE(found.stat().st_mode) == 0o700
    found.rmdir()
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    found.symlink_to(elsewhere)
    with pytest.raises(LockError, match="belongs to another user"):
        local_folder()
    found.unlink()
    found.mkdir()
    for mode in (0o770, 0o702):
        found.chmod(mode)
        with pytest.raises(LockError, match="other users may write to it"):
            local_folder()
    found.chmod(0o755)
    assert local_folder() == found


def test_another_users_file_is_taken_only_where_the_folder_is_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_lock.tempfile, "gettempdir", lambda: str(tmp_path))
    mine, shared = LocalLock(b"report", "report"), lock(tmp_path)
    for each in (mine, shared):
        each.path.touch()
        try:
            os.chown(each.path, os.getuid() + 1, -1)
        except PermissionError:
            pytest.skip("only root may give a file to another user")
    with pytest.raises(LockError, match="belongs to another user"):
        mine.try_acquire(ME)
    assert shared.holder() is None
    assert shared.try_acquire(ME)


def test_a_file_with_a_second_name_is_refused(tmp_path: Path) -> None:
    """It may be another program's."""
    (tmp_path / "other").touch()
    lock(tmp_path).path.hardlink_to(tmp_path / "other")
    mine = lock(tmp_path)
    for call in (lambda: mine.try_acquire(ME), mine.holder):
        with pytest.raises(LockError, match="a second name"):
            call()
    assert mine._file is not None
    assert mine._file.closed
    assert held_locally(tmp_path) == []


def test_an_error_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    (tmp_path / "file").touch()
    within = lock(tmp_path / "file" / "folder")
    with pytest.raises(LockError, match=r"the one in Redis: .*/folder: Not a directory"):
        within.try_acquire(ME)
    assert problem_of(tmp_path) is None
    mine = lock(tmp_path)
    monkeypatch.setattr(file_lock.fcntl, "flock", no_locks)
    words = f"the one in Redis: {mine.path}: No locks available"
    with pytest.raises(LockError, match=words) as caught:
        mine.try_acquire(ME)
    assert caught.value.lock_name == "report"


def test_a_folder_is_made(tmp_path: Path) -> None:
    """For whom the umask lets."""
    before = os.umask(0o027)
    try:
        assert lock(tmp_path / "var" / "locks").try_acquire(ME)
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "var" / "locks").stat().st_mode) == 0o750


@pytest.mark.parametrize(("folder_mode", "mode"), [(0o1777, 0o666), (0o770, 0o660), (0o755, 0o600)])
def test_who_may_write_to_the_folder_may_lock(tmp_path: Path, folder_mode: int, mode: int) -> None:
    """Whatever the umask: processes of other users would get an error, also from what a process
    that was killed has left."""
    tmp_path.chmod(folder_mode)
    before = os.umask(0o077)
    try:
        mine = lock(tmp_path)
        assert mine.try_acquire(ME)
    finally:
        os.umask(before)
    assert stat.S_IMODE(mine.path.stat().st_mode) == mode
    assert not lock(tmp_path).try_acquire(ME)
