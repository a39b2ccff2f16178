"""Locks on Redis. Knows Redis, does not know Django."""
