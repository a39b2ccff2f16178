"""``{% load redis_lock %}``: ``{% cached 500 sidebar request.user.pk %} … {% endcached %}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from django import template
from django.core.cache import caches
from django.core.cache.utils import make_template_fragment_key
from django.template.base import FilterExpression, Node, NodeList, Parser, Token
from django.template.context import Context
from django.template.exceptions import TemplateSyntaxError

from ..cache import lock_cache

register = template.Library()

OPTIONS = ("using", "stale", "wait", "jitter")


@dataclass(eq=False)
class CachedNode(Node):
    nodelist: NodeList
    timeout: FilterExpression
    name: str
    vary_on: list[FilterExpression]
    options: dict[str, FilterExpression]

    def render(self, context: Context) -> Any:
        options = {name: value.resolve(context) for name, value in self.options.items()}
        alias = options.pop("using", None) or _default_alias()
        if alias not in caches.settings:
            raise TemplateSyntaxError(f"cached: there is no cache {alias!r}")
        cache: Any = lock_cache(alias)
        timeout = _seconds("timeout", self.timeout.resolve(context))
        options = {name: _seconds(name, value) for name, value in options.items()}
        # Never in another thread: the context is this one's, and goes on with the page.
        options.update(background=False, soft_timeout=None)
        key = make_template_fragment_key(self.name, [v.resolve(context) for v in self.vary_on])
        fragment = cache.get_or_set(key, lambda: self.nodelist.render(context), timeout, **options)
        return "" if fragment is None else fragment  # ON_WAIT_TIMEOUT is "default".


def _seconds(name: str, value: Any) -> Any:
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise TemplateSyntaxError(f"cached: {name} must be a number, not {value!r}") from None


def _default_alias() -> str:
    return "template_fragments" if "template_fragments" in caches.settings else "default"


@register.tag
def cached(parser: Parser, token: Token) -> CachedNode:
    """Keep what is rendered between ``{% cached %}`` and ``{% endcached %}``.

    ``{% cached timeout name vary_on… using="alias" stale=30 wait=5 jitter=0.1 %}``: as Django's
    ``{% cache %}`` and with the same keys; a missing fragment is rendered by one, for all who wait.
    """
    nodelist = parser.parse(("endcached",))
    parser.delete_first_token()
    words = token.split_contents()
    if len(words) < 3:
        raise TemplateSyntaxError("cached needs at least a timeout and a name")
    options, vary_on = {}, []
    for word in words[3:]:
        name, equals, value = word.partition("=")
        if equals and name in OPTIONS:
            options[name] = parser.compile_filter(value)
        else:
            vary_on.append(parser.compile_filter(word))
    return CachedNode(nodelist, parser.compile_filter(words[1]), words[2], vary_on, options)
