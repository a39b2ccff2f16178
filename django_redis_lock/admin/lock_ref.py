"""How URLs and forms of the page identify a lock, and the holder that was shown."""

from __future__ import annotations

import base64
import binascii
from typing import NamedTuple

from ..inventory import FLIGHT, LOCK, LockInfo


class Ref(NamedTuple):
    """A lock or computation; not its holder."""

    alias: str
    key: bytes
    kind: str

    def __str__(self) -> str:
        """For URLs: letters, digits, ``-`` and ``_``."""
        parts = (self.kind.encode(), self.alias.encode(), self.key)
        return base64.urlsafe_b64encode(b"\0".join(parts)).rstrip(b"=").decode()

    @classmethod
    def parse(cls, text: str) -> Ref | None:
        """The reverse of ``str``; None for any other text."""
        try:
            packed = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
            kind, alias, key = packed.split(b"\0", 2)
            ref = cls(alias.decode(), key, kind.decode())
        except (ValueError, binascii.Error):
            return None
        return ref if key and ref.kind in (LOCK, FLIGHT) and str(ref) == text else None


class Choice(NamedTuple):
    """A lock and the holder that was shown, to release exactly that acquisition."""

    ref: Ref
    owner_id: str
    fence: int | None

    def __str__(self) -> str:
        return f"{self.ref}.{self.owner_id}.{'' if self.fence is None else self.fence}"

    @classmethod
    def of(cls, ref: Ref, lock: LockInfo) -> Choice:
        return cls(ref, lock.owner.id, lock.fence)

    @classmethod
    def parse(cls, text: str) -> Choice | None:
        """The reverse of ``str``; None for any other text."""
        encoded, _, rest = text.partition(".")
        owner_id, _, fence = rest.partition(".")
        ref = Ref.parse(encoded)
        if ref is None or not owner_id or not (fence.isascii() and (fence.isdigit() or not fence)):
            return None
        return cls(ref, owner_id, int(fence[:20]) if fence else None)
