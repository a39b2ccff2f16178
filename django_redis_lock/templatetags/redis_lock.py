"""``{% load redis_lock %}``: ``{% cached 500 sidebar request.user.pk %} … {% endcached %}``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import uuid4

from django import template
from django.core.cache import caches
from django.core.cache.utils import make_template_fragment_key
from django.template.base import FilterExpression, Node, NodeList, Parser, Token
from django.template.context import Context
from django.template.exceptions import TemplateSyntaxError
from django.utils.html import format_html

from ..cache import MISSING, value_cache
from ..conditions import Conditions
from ..threads import get_logger

logger = get_logger("django_redis_lock.pages")

register = template.Library()


@register.simple_tag(takes_context=True)
def idempotency_key(context: Context, name: str = "idempotency_key") -> str:
    """A hidden field for a form whose view has ``@idempotent(key=field())``: sent twice, it is
    carried out once. A page or fragment with it is not stored: the next form has another key."""
    key = str(uuid4())
    request = context.get("request")
    if request is not None:  # Perhaps Django REST framework's around Django's.
        vars(getattr(request, "_request", request))["nonce_of_form"] = key
    return format_html('<input type="hidden" name="{}" value="{}">', name, key)


#: Seconds for which the callers of a fragment with a CSRF token do not wait for each other.
NOT_CACHEABLE_SECONDS = 5.0
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
        cache = value_cache(alias)
        timeout = _seconds("timeout", self.timeout.resolve(context))
        options = {name: _seconds(name, value) for name, value in options.items()}
        # Never in another thread: the context is this one's, and goes on with the page.
        options.update(background=False, soft_timeout=None)
        key = make_template_fragment_key(self.name, [v.resolve(context) for v in self.vary_on])
        rendered: list[str] = []

        def compute() -> str | None:
            text, of_visitor = self._render(context)
            rendered.append(text)
            return None if of_visitor else text

        def lifetime(fragment: str | None) -> float | None:
            return NOT_CACHEABLE_SECONDS if fragment is None else timeout

        fragment = cache.get_or_set(key, compute, lifetime, **options)
        if fragment is None and not rendered and cache.get(key, MISSING) is None:
            compute()  # Otherwise ON_WAIT_TIMEOUT is "default".
        return "".join(rendered) if fragment is None else fragment

    def _render(self, context: Context) -> tuple[str, str]:
        """The text, and what it has that belongs to one visitor, such as a CSRF token."""
        request = getattr(context, "request", None) or context.get("request")
        if request is None:
            return self.nodelist.render(context), ""
        conditions = Conditions(request, ())
        conditions.take_out()
        try:
            text = self.nodelist.render(context)
        finally:
            conditions.put_back()
        of_visitor = conditions.of_client or conditions.secret_in(text)
        if of_visitor and _warned.setdefault(self.name, mine := object()) is mine:
            words = "The fragment %s is not cached: it has %s. Move it out of {%% cached %%}"
            logger.warning(words, self.name, of_visitor)
        return text, of_visitor


#: Names of fragments that have a CSRF token: each is logged once.
_warned: dict[str, object] = {}


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
        raise TemplateSyntaxError(
            "cached needs at least a timeout and a name: {% cached 500 sidebar %}"
        )
    options, vary_on = {}, []
    for word in words[3:]:
        name, equals, value = word.partition("=")
        if equals and name in OPTIONS:
            options[name] = parser.compile_filter(value)
        elif equals and name.isidentifier():
            known = ", ".join(OPTIONS)
            raise TemplateSyntaxError(f"cached has no option {name!r}; it has {known}")
        else:
            vary_on.append(parser.compile_filter(word))
    return CachedNode(nodelist, parser.compile_filter(words[1]), words[2], vary_on, options)
