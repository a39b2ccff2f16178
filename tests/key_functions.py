"""Functions for the setting KEY_FUNCTION."""

import hashlib
from typing import Any


def unchanged(key: Any, prefix: str, version: Any) -> str:
    return str(key)


def hashed(key: Any, prefix: str, version: Any) -> str:
    return hashlib.sha256(f"{prefix}:{version}:{key}".encode()).hexdigest()


def last(key: Any, prefix: str, version: Any) -> str:
    """The prefix comes last."""
    return f"{key}:{prefix}:{version}"
