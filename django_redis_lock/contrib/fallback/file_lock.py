"""A lock for the threads and processes of one host, while Redis is down: a file that the kernel
locks (``flock``). The kernel releases it when the process ends, also after a crash.

``release`` removes the file while it is locked. So after locking a file, a caller checks that it is
still the file at that path.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakSet

from ...clock import time
from ...exceptions import LockError
from ...protocol import Owner
from ...threads import after_fork

#: Seconds between two attempts to lock a file: at first, and at most.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.001, 0.02
SUFFIX = ".lock"


def local_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of this host's locks: ``folder``, or one of this user in the system's folder for
    temporary files. Raises LockError if it cannot be used."""
    user = os.getuid()
    path = Path(folder) if folder else Path(tempfile.gettempdir(), f"django_redis_lock-{user}")
    try:
        path.mkdir(mode=0o777 if folder else 0o700, parents=bool(folder), exist_ok=True)
        found = path.lstat()
    except OSError as error:
        raise LockError(f"Local locks cannot be kept in {path}: {error}") from error
    if not folder and (not stat.S_ISDIR(found.st_mode) or found.st_uid != user):
        raise LockError(f"Local locks cannot be kept in {path}: it belongs to another user")
    return path


class LocalLock:
    """One attempt to hold the lock of these servers and key (``identity``) on this host; shown as
    ``name``. Raises LockError if ``folder`` cannot have local locks."""

    def __init__(
        self, identity: bytes, name: str, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.name = name
        digest = hashlib.sha256(identity).hexdigest()[:40]
        self.path = local_folder(folder) / f"{digest}{SUFFIX}"
        #: A file object, so that Python closes it if an interrupt loses the reference.
        self._file: FileIO | None = None

    def try_acquire(self, owner: Owner, in_addition: bool = False) -> bool:
        """Take it if it is free, described as ``owner``'s; ``in_addition`` to the lock in Redis."""
        if not self._take():
            return False
        self._describe(owner, in_addition)
        return True

    def is_in_addition(self) -> bool:
        found = _description(self.path)
        return found is not None and bool(found.get("in_addition"))

    def _take(self) -> bool:
        try:
            file = self._file = FileIO(self.path, "r+", opener=_open)
        except OSError as error:
            raise LockError(f"No local lock at {self.path}: {error}", self.name) from error
        if _lock(file.fileno(), fcntl.LOCK_EX) and self._is_current(file):
            _held.add(self)
            return True
        file.close()
        return False

    def _is_current(self, file: FileIO) -> bool:
        """Its former holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _describe(self, owner: Owner, in_addition: bool) -> None:
        assert self._file is not None
        fields = [*owner.fields(), "since", str(owner.since)]
        described = {"name": self.name, "in_addition": in_addition, "fields": fields}
        text = json.dumps(described)
        with suppress(OSError):  # A full disk does not matter: the lock is held.
            os.truncate(self._file.fileno(), 0)
            os.pwrite(self._file.fileno(), text.encode(), 0)

    def holder(self) -> Owner | None:
        found = _holder(self.path)
        return None if found is None else found[1]

    def release(self) -> None:
        """A second call completes a release that was interrupted."""
        file = self._file
        if file is not None and not file.closed:
            if self._is_current(file):  # Or an interrupted release has removed it already.
                with suppress(OSError):
                    os.unlink(self.path)
            file.close()
        _held.discard(self)

    def __del__(self) -> None:
        # A lock object that was dropped without release(). In Redis its lock would expire.
        if getattr(self, "_file", None) is not None:
            with suppress(Exception):  # The interpreter may be going down.
                self.release()


def _open(path: str, flags: int) -> int:
    """For every user who may write to the folder. In one like /tmp, the system may refuse to let
    O_CREAT open another user's file."""
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags | os.O_NOFOLLOW)
        with suppress(FileExistsError):
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            may_write = os.stat(os.path.dirname(path)).st_mode & 0o222
            os.fchmod(file, may_write | may_write << 1)
            return file


def pauses(deadline: float) -> Iterator[float]:
    """Seconds between polls, until ``deadline`` (monotonic). The first two come in any case:
    another process may just be reading who holds the lock."""
    pause = FIRST_PAUSE_SECONDS
    yield from (pause, pause)
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 2, MAX_PAUSE_SECONDS)


def held_locally(folder: str | os.PathLike[str] | None = None) -> list[tuple[str, Owner]]:
    """The names and holders of the locks that are held on this host."""
    found = (_holder(path) for path in sorted(local_folder(folder).glob(f"*{SUFFIX}")))
    return sorted((f for f in found if f is not None), key=lambda held: held[0])


def _holder(path: Path) -> tuple[str, Owner] | None:
    said = _description(path)
    if said is None:
        return None
    try:
        fields = said["fields"]
        described = dict(zip(fields[::2], fields[1::2], strict=True))
        return str(said["name"]), Owner.from_fields(described, described["id"])
    except (ValueError, KeyError, TypeError):
        return path.stem, Owner(path.stem[:8])  # Its holder is writing it.


def _description(path: Path) -> dict[str, Any] | None:
    """What the holder wrote; None if the lock is free."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        if _lock(file, fcntl.LOCK_SH):
            return None
        said = json.loads(os.pread(file, 10_000, 0))
        return said if isinstance(said, dict) else {}
    except (OSError, ValueError):
        return {}
    finally:
        os.close(file)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


_held: WeakSet[LocalLock] = WeakSet()


@after_fork
def _forget_held() -> None:
    for lock in tuple(_held):  # The parent holds them.
        if lock._file is not None:
            lock._file.close()
    _held.clear()
