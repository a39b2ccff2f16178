"""A lock for the threads and processes of one host, while Redis is down: a file that the kernel
locks (``flock``). The kernel releases it when the process ends, also after a crash.

``release`` removes the file while it is locked. So after locking a file, a caller checks that it is
still the file at that path. Only the kernel's "would block" means that another has the lock; any
other failure is a ``LocalLockUnavailable``.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any
from weakref import WeakSet, ref

from ...clock import time
from ...exceptions import LocalLockUnavailable
from ...locking import Hold
from ...protocol import Owner
from ...threads import after_fork
from ...transport.refusals import raise_interrupt

#: Seconds between two attempts to lock a file: at first, and at most.
FIRST_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.001, 0.02
SUFFIX = ".lock"
#: The folder of a user in the system's folder for temporary files.
FOLDER = "django_redis_lock-%d"
#: How a file is opened that may be another user's: no link, no wait for a pipe's other end.
SAFELY = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
#: The description of a lock in addition to that in Redis, until its holder has written the whole:
#: a length needs no room on the disk.
IN_ADDITION = b"\0"


@contextmanager
def _reporting(path: Path | None = None, name: str | None = None) -> Iterator[None]:
    """Raise LocalLockUnavailable for an OSError."""
    try:
        yield
    except OSError as error:
        raise_interrupt(error)
        parts = (error.filename or path, error.strerror or str(error))
        text = ": ".join(str(part) for part in parts if part)
        words = f"No lock of this host can replace the one in Redis: {text}"
        raise LocalLockUnavailable(words, name) from error


def local_folder(folder: str | os.PathLike[str] | None = None) -> Path:
    """The folder of this host's locks: ``folder``, or one of this user in the system's folder for
    temporary files. Raises LocalLockUnavailable if it cannot be used."""
    with _reporting():
        user = os.getuid()
        path = Path(folder) if folder else Path(tempfile.gettempdir(), FOLDER % user)
        path.mkdir(mode=0o777 if folder else 0o700, parents=bool(folder), exist_ok=True)
        if not folder:
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode) or found.st_uid != user:
                raise _refusal("it belongs to another user", path)
            if found.st_mode & 0o022:
                raise _refusal("other users may write to it", path)
    return path


def _refusal(why: str, path: Path) -> OSError:
    return OSError(errno.EPERM, why, str(path))


def problem_of(folder: str | os.PathLike[str] | None = None) -> LocalLockUnavailable | None:
    """Why ``folder`` cannot have the locks of this host; None if it can."""
    first, second = (LocalLock(b"problem_of\0%d" % os.getpid(), "", folder) for _ in range(2))
    try:
        if first.try_acquire(Owner("")) and second.try_acquire(Owner("")):
            return LocalLockUnavailable(f"{folder} cannot have locks of this host: two got one")
    except LocalLockUnavailable as error:
        return error
    finally:
        for attempt in (second, first):
            attempt.release()
    return None


class LocalLock:
    """One attempt to hold the lock of these servers and key (``identity``) on this host; shown as
    ``name``. Methods raise LocalLockUnavailable if ``folder`` cannot have local locks."""

    _path: Path  #: That of the file.
    _hold: ref[Hold] | None = None

    def __init__(
        self, identity: bytes, name: str, folder: str | os.PathLike[str] | None = None
    ) -> None:
        self.identity = identity
        self.name = name
        self._folder = folder
        #: A file object, so that Python closes it if an interrupt loses the reference.
        self._file: FileIO | None = None

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(self.identity).hexdigest()[:40]
        return local_folder(self._folder) / f"{digest}{SUFFIX}"

    def try_acquire(self, owner: Owner, in_addition: bool = False) -> bool:
        """Take it if it is free, described as ``owner``'s; ``in_addition`` to the lock in Redis."""
        path = self._path = self.path
        with _reporting(path, self.name):
            if not self._take(path):
                return False
        self._describe(owner, in_addition)
        return True

    def belongs_to(self, hold: Hold) -> None:
        """It is released with ``hold``, which has it."""
        self._hold = ref(hold)
        hold.on_end = self.release

    def holder_here(self) -> Hold | None:
        """The hold of this process that has it, by another attempt."""
        for other in tuple(_held):
            if other._hold and other._path == self._path and other._file and not other._file.closed:
                return other._hold()
        return None

    def is_in_addition(self) -> bool:
        return bool(self._description().get("in_addition"))

    def holder(self, also_in_redis: bool = True) -> Owner | None:
        """None if it is free, or, unless ``also_in_redis``, held in addition to that in Redis."""
        said = self._description()
        wanted = said.get("held") and (also_in_redis or not said.get("in_addition"))
        return _holder(self.path, said)[1] if wanted else None

    def _description(self) -> dict[str, Any]:
        path = self.path
        with _reporting(path, self.name):
            return _description(path)

    def _take(self, path: Path) -> bool:
        file = self._file = FileIO(path, "r+", opener=_open)
        taken = False
        try:
            _check(file.fileno(), path, own=not self._folder)
            taken = _lock(file.fileno(), fcntl.LOCK_EX) and self._is_current(file)
        finally:
            if not taken:
                file.close()
        if taken:
            _held.add(self)
        return taken

    def _is_current(self, file: FileIO) -> bool:
        """Its former holder may have removed it."""
        try:
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self._path))
        except FileNotFoundError:
            return False

    def _describe(self, owner: Owner, in_addition: bool) -> None:
        assert self._file is not None
        fields = [*owner.fields(), "since", str(owner.since)]
        described = {"name": self.name, "in_addition": in_addition, "fields": fields}
        text = json.dumps(described)
        with suppress(OSError):  # The lock is held, also on a full disk.
            os.truncate(self._file.fileno(), 0)
            if in_addition:
                os.truncate(self._file.fileno(), len(IN_ADDITION))
            os.pwrite(self._file.fileno(), text.encode(), 0)

    def release(self) -> None:
        """A second call completes a release that was interrupted."""
        file = self._file
        if file is not None and not file.closed:
            with suppress(OSError):
                if self._is_current(file):  # Or an interrupted release has removed it already.
                    os.unlink(self._path)
            with suppress(OSError):  # The file is closed even so.
                file.close()

    def __del__(self) -> None:
        # A lock object that was dropped without release(). In Redis its lock would expire.
        if getattr(self, "_file", None) is not None:
            try:
                self.release()
            except Exception:  # The interpreter is going down, with suppress.
                pass


def _open(path: str, flags: int) -> int:
    """For every user who may write to the folder. In one like /tmp, the system may refuse to let
    O_CREAT open another user's file."""
    flags |= SAFELY
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, flags)
        with suppress(FileExistsError):
            file = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
            with suppress(OSError):  # Some file systems have no modes.
                may_write = os.stat(os.path.dirname(path)).st_mode & 0o222
                os.fchmod(file, may_write | may_write << 1)
            return file


def _check(file: int, path: Path, *, own: bool) -> None:
    """Raises OSError if it is no file that only this path leads to; ``own``: nor this user's."""
    found = os.fstat(file)
    if not stat.S_ISREG(found.st_mode):
        raise _refusal("it is no regular file", path)
    if found.st_nlink > 1:
        raise _refusal("it has a second name (a hard link)", path)
    if own and found.st_uid != os.getuid():
        raise _refusal("it belongs to another user", path)


def pauses(deadline: float) -> Iterator[float]:
    """Seconds between polls, until ``deadline`` (monotonic). The first two come in any case:
    another process may just be reading who holds the lock."""
    pause = FIRST_PAUSE_SECONDS
    yield from (pause, pause)
    while (left := deadline - time.monotonic()) > 0:
        yield min(pause, left)
        pause = min(pause * 2, MAX_PAUSE_SECONDS)


def held_locally(folder: str | os.PathLike[str] | None = None) -> list[tuple[str, Owner]]:
    """The names and holders of the locks that are held on this host. Raises LocalLockUnavailable if
    ``folder`` cannot have any."""
    held: list[tuple[str, Owner]] = []
    for path in sorted(local_folder(folder).glob(f"*{SUFFIX}")):
        with suppress(OSError):  # Another user's, or no lock.
            if (said := _description(path))["held"]:
                held.append(_holder(path, said))
    return sorted(held, key=lambda held: held[0])


def _holder(path: Path, said: dict[str, Any]) -> tuple[str, Owner]:
    """The name and the holder of a lock with this description."""
    try:
        fields = said["fields"]
        described = dict(zip(fields[::2], fields[1::2], strict=True))
        return str(said["name"]), Owner.from_fields(described, described["id"])
    except (ValueError, KeyError, TypeError):
        return path.stem, Owner(path.stem[:8])  # Its holder is writing it.


def _description(path: Path) -> dict[str, Any]:
    """What the holder wrote, and whether the lock is ``held``."""
    try:
        file = os.open(path, os.O_RDONLY | SAFELY)
    except FileNotFoundError:
        return {"held": False}
    try:
        _check(file, path, own=False)
        if _lock(file, fcntl.LOCK_SH):
            return {"held": False}
        text = os.pread(file, 10_000, 0)
        said = {"in_addition": True} if text == IN_ADDITION else json.loads(text)
        return {**said, "held": True}
    except (ValueError, TypeError):
        return {"held": True}
    finally:
        os.close(file)


def _lock(file: int, how: int) -> bool:
    try:
        fcntl.flock(file, how | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


#: All that were held in this process, and perhaps are.
_held: WeakSet[LocalLock] = WeakSet()


@after_fork
def _forget_held() -> None:
    for lock in tuple(_held):  # The parent holds them.
        if lock._file is not None:
            lock._file.close()
