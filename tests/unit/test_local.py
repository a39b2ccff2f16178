"""Locks of this host: between threads, between processes, and what is left of them."""

from __future__ import annotations

import math
import os
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
)
from django_redis_lock.protocol.owner import Owner
from tests.processes import Link, in_threads, processes

ME = Owner("abcd", "host", 42, "main", "a test", 1_700_000_000.0)


def lock(folder: Path, where: bytes = b"report") -> LocalLock:
    return LocalLock(where, "report", folder)


def test_one_at_a_time(tmp_path: Path) -> None:
    one, two = lock(tmp_path), lock(tmp_path)
    assert one.try_acquire(ME)
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
    mine.release()
    assert lock(tmp_path).holder() is None
    assert held_locally(tmp_path) == []


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    with_it = lock(tmp_path)
    with_it.try_acquire(ME)
    assert list(tmp_path.iterdir())
    with_it.release()
    assert not list(tmp_path.iterdir())


def test_a_handle_that_is_dropped_gives_it_up(tmp_path: Path) -> None:
    lock(tmp_path).try_acquire(ME)
    assert lock(tmp_path).try_acquire(ME)


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


def hold(link: Link, folder: Path) -> None:
    mine = lock(folder)
    assert mine.try_acquire(ME)
    link.say("has it")
    link.hear()


def test_it_ends_with_its_process(tmp_path: Path) -> None:
    with processes(hold, tmp_path) as (other,):
        other.go()
        assert other.hear() == "has it"
        assert not lock(tmp_path).try_acquire(ME)
        other.kill()
        assert lock(tmp_path).holder() is None
        assert lock(tmp_path).try_acquire(ME)


def test_a_forked_child_does_not_keep_it(tmp_path: Path) -> None:
    mine = lock(tmp_path)
    mine.try_acquire(ME)
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.read(reading, 1)  # Until the parent is done.
        os._exit(0)
    os.close(reading)
    try:
        assert not lock(tmp_path).try_acquire(ME)
        mine.release()
        assert lock(tmp_path).try_acquire(ME)
    finally:
        os.close(writing)
        os.waitpid(child, 0)


def test_a_forked_child_does_not_end_it(tmp_path: Path) -> None:
    mine = lock(tmp_path)
    mine.try_acquire(ME)
    child = os.fork()
    if not child:
        mine.release()
        del mine
        os._exit(0)
    os.waitpid(child, 0)
    assert not lock(tmp_path).try_acquire(ME)


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
        taken = 0
        for _ in range(200):
            mine = lock(tmp_path)
            taken += mine.try_acquire(ME) or any(
                time.sleep(pause) or mine.try_acquire(ME) for pause in pauses(-math.inf)
            )
            mine.release()
        assert taken >= 195
    finally:
        stop.set()
        looking.join()


def test_the_folder_is_this_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_lock.tempfile, "gettempdir", lambda: str(tmp_path))
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
    found.chmod(0o770)
    with pytest.raises(LockError, match="other users may write to it"):
        local_folder()


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
    assert shared.try_acquire(ME)


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LockError, match="Not a directory"):
        lock(tmp_path / "file" / "folder").try_acquire(ME)


def test_a_folder_is_made(tmp_path: Path) -> None:
    assert lock(tmp_path / "var" / "locks").try_acquire(ME)


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
