"""Small charts of the figures, as SVG."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from django.utils.html import escape
from django.utils.safestring import SafeString, mark_safe

from ...formatting import ENGLISH
from .figures import BOUNDS
from .report import Distribution

#: Classes shown at least, so that one bar does not fill the chart.
LEAST_CLASSES = 7
#: The height of an axis's labels, and the least width of one, in SVG units.
LABELS, LABEL_WIDTH = 16, 44


def histogram_svg(
    distribution: Distribution,
    title: str,
    description: str | None = None,
    *,
    width: int = 360,
    height: int = 96,
    shown: Callable[[float], str] = ENGLISH.measured,
) -> SafeString:
    """A bar for each class of ``distribution``, from the shortest to the longest that occur.

    Args:
        title: of the chart, such as "How long import was held".
        description: its content, for screen readers; by default in English.
        width, height: in SVG units.
        shown: formats seconds; by default in English.
    """
    if description is None:
        description = _describe(distribution)
    first, last = _shown_classes(distribution.counts)
    counts = distribution.counts[first : last + 1]
    step, floor, most = width / len(counts), height - LABELS, max((*counts, 1))
    bars, labels = [], []
    apart = max(1, -(-LABEL_WIDTH // max(int(step), 1)))
    for index, count in enumerate(counts):
        size = count / most * (floor - 4)
        tall = max(size, 1.5) if count else 0.0
        left = index * step
        bars.append(
            f"<g><title>{escape(_class_name(first + index, shown))}: {count}</title>"
            f'<rect class="redis-lock-space" x="{left:.1f}" y="0" width="{step:.1f}" '
            f'height="{floor}" fill="none" pointer-events="all"/>'
            f'<rect class="redis-lock-bar" x="{left + 1:.1f}" y="{floor - tall:.1f}" '
            f'width="{max(step - 2, 1):.1f}" height="{tall:.1f}" fill="currentColor"/></g>'
        )
        # A label stands at the end of its class.
        if first + index < len(BOUNDS) and index % apart == apart - 1 and index + 1 < len(counts):
            text = escape(shown(BOUNDS[first + index]))
            labels.append(
                f'<text class="redis-lock-label" x="{left + step:.1f}" y="{height - 3}" '
                f'font-size="11" text-anchor="middle" fill="currentColor">{text}</text>'
            )
    axis = (
        f'<line class="redis-lock-axis" x1="0" y1="{floor + 0.5}" x2="{width}" '
        f'y2="{floor + 0.5}" stroke="currentColor" stroke-opacity="0.4"/>'
    )
    return _svg("histogram", title, description, width, height, [*bars, axis, *labels])


def sparkline_svg(
    numbers: Sequence[int],
    title: str,
    description: str | None = None,
    *,
    width: int = 80,
    height: int = 28,
) -> SafeString:
    """A line through ``numbers``, oldest first, such as acquisitions over time; its scale goes from
    0 to the largest number.

    Args:
        title, description, width, height: as for ``histogram_svg``.
    """
    most = max((*numbers, 1))
    left, floor = 6 * len(str(most)) + 5, height - 3
    step = (width - left - 2) / max(len(numbers) - 1, 1)
    points = " ".join(
        f"{left + index * step:.1f},{floor - number / most * (floor - 3):.1f}"
        for index, number in enumerate(numbers)
    )
    scale = "".join(
        f'<line class="redis-lock-axis" x1="{left}" y1="{y}" x2="{width}" y2="{y}" '
        'stroke="currentColor" stroke-opacity="0.25"/>'
        f'<text class="redis-lock-label" x="{left - 4}" y="{text_at}" font-size="10" '
        f'text-anchor="end" fill="currentColor">{number}</text>'
        for number, y, text_at in ((most, 3, 9), (0, floor, height - 1))
    )
    line = (
        f'<polyline class="redis-lock-line" points="{points}" fill="none" stroke="currentColor" '
        'stroke-width="1.5" stroke-linejoin="round" stroke-linecap="round"/>'
    )
    description = description or f"{max((*numbers, 0))} at most"
    return _svg("sparkline", title, description, width, height, [scale, line])


def _svg(
    kind: str, title: str, description: str, width: int, height: int, parts: list[str]
) -> SafeString:
    drawn = "".join(parts)
    digest = hashlib.blake2b(f"{kind}{title}{drawn}".encode(errors="replace"), digest_size=6)
    id = f"redis-lock-{digest.hexdigest()}"
    return mark_safe(
        f'<svg class="redis-lock-chart redis-lock-{kind}" xmlns="http://www.w3.org/2000/svg" '
        f'role="img" aria-labelledby="{id}-title {id}-desc" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}">'
        f'<title id="{id}-title">{escape(title)}</title>'
        f'<desc id="{id}-desc">{escape(description)}</desc>{drawn}</svg>'
    )


def _describe(distribution: Distribution) -> str:
    half, most = distribution.quantile(0.5), distribution.quantile(0.95)
    if half is None or most is None:
        return "Nothing was counted."
    times = f"{distribution.count} times" if distribution.count > 1 else "Once"
    half_text, most_text = ENGLISH.measured(half), ENGLISH.measured(most)
    return f"{times}; half within {half_text}, 95 % within {most_text}."


def _class_name(index: int, shown: Callable[[float], str]) -> str:
    if index == 0:
        return f"≤ {shown(BOUNDS[0])}"
    if index == len(BOUNDS):
        return f"> {shown(BOUNDS[-1])}"
    return f"{shown(BOUNDS[index - 1])} – {shown(BOUNDS[index])}"


def _shown_classes(counts: Sequence[int]) -> tuple[int, int]:
    """Those that occur, and at least LEAST_CLASSES."""
    used = [index for index, count in enumerate(counts) if count] or [len(counts) // 2]
    first, last = used[0], used[-1]
    while last - first + 1 < LEAST_CLASSES:
        first, last = max(first - 1, 0), min(last + 1, len(counts) - 1)
    return first, last
