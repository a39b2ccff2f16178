"""Spans for Sentry, by way of ``sentry-sdk``, below the span or transaction of the caller.

Reads and stores are those of Sentry's page "Caches"; see ``docs/other_tools.md``.
"""

from __future__ import annotations

from datetime import datetime, timezone

import sentry_sdk
import sentry_sdk.tracing

from ...events import Subject
from .listening import Span, Spans, subscribe_instead


class Sentry(Spans):
    def record(self, span: Span) -> None:
        parent, subject = sentry_sdk.get_current_span(), span.subject
        # Sentry's own spans of a cache (``cache_spans`` of its Django integration) suffice.
        observed = span.operation == "cache get" and hasattr(subject.cache, "_sentry_patched")
        if parent is None or observed:
            return
        child = parent.start_child(
            op=span.operation.replace(" ", "."),
            name=subject.name,
            start_timestamp=datetime.fromtimestamp(span.began, timezone.utc),
        )
        for name, value in {**_about(span.operation, subject), **span.about}.items():
            child.set_data(name, value)
        child.finish(end_timestamp=datetime.fromtimestamp(span.ended, timezone.utc))

    def begin(self, subject: Subject) -> sentry_sdk.tracing.Span | None:
        parent = sentry_sdk.get_current_span()
        if parent is None:
            return None
        span = parent.start_child(op="function", name=f"compute {subject.group}")
        for name, value in _about("cache", subject).items():
            span.set_data(name, value)
        return span.__enter__()

    def end(self, begun: sentry_sdk.tracing.Span, error: BaseException | None) -> None:
        begun.__exit__(type(error) if error else None, error, None)


def _about(operation: str, subject: Subject) -> dict[str, object]:
    if operation.startswith("cache"):
        return {"cache.key": [subject.name], "cache.group": subject.group}
    said: dict[str, object] = {"lock.name": subject.name, "lock.group": subject.group}
    return {**said, "lock.label": subject.label} if subject.label else said


def start() -> Sentry:
    """Start the exporter, instead of one started before."""
    exporter = Sentry()
    subscribe_instead(exporter)
    return exporter
