"""Functions for the setting KEY_FUNCTION."""

from typing import Any


def unchanged(key: Any, prefix: str, version: Any) -> str:
    return str(key)
