"""The documentation site: ``make docs`` builds it from the Markdown beside this file."""

import os
import re
from typing import Any

import django
from django.conf import settings
from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform
from sphinx.util.nodes import make_refnode

import django_redis_lock

# The reference is made from docstrings; to import the modules, Django needs these settings.
settings.configure(
    INSTALLED_APPS=[
        "django.contrib.admin",
        "django.contrib.auth",
        "django.contrib.contenttypes",
        "django.contrib.messages",
        "django_redis_lock",
    ],
)
django.setup()

project = "django_redis_lock"
author = "The django_redis_lock contributors"
project_copyright = author
version = release = django_redis_lock.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]

# The inventories of others are on the network, which a build elsewhere does without.
if os.environ.get("READTHEDOCS"):
    extensions.append("sphinx.ext.intersphinx")
intersphinx_mapping = {
    "python": ("https://docs.python.org/3", None),
    "django": (
        "https://docs.djangoproject.com/en/stable",
        "https://docs.djangoproject.com/en/stable/_objects",
    ),
    "redis": ("https://redis.readthedocs.io/en/stable", None),
}

# The links between the pages are those that GitHub follows too.
myst_heading_anchors = 3

autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
napoleon_use_rtype = False

highlight_language = "none"
html_theme = "furo"
html_title = "django-redis-lock"
html_static_path = ["static"]
html_css_files = ["tables.css"]


class LinkNames(SphinxPostTransform):
    """Links each name in the text that the reference describes, such as ``locked()``, ``Lock`` or
    ``cache.lock()``, to its description."""

    default_priority = 5
    #: A name, perhaps of a cache's method, and perhaps its call.
    NAME = re.compile(r"@?((?:cache\.)?\w+)(?:\(.*\))?")

    def run(self, **kwargs: Any) -> None:
        described = self.env.domains.python_domain.objects
        for node in list(self.document.findall(nodes.literal)):
            found = self.NAME.fullmatch(node.astext())
            inside = (nodes.reference, nodes.title, addnodes.pending_xref, addnodes.desc_signature)
            if not found or any(isinstance(each, inside) for each in _parents(node)):
                continue
            package, of_cache, name = "django_redis_lock", "cache.", found[1]
            targets = (
                [f"{package}.cache.RedisCache.{name.removeprefix(of_cache)}"]
                if name.startswith(of_cache)
                else [f"{package}{module}.{name}" for module in ("", ".exceptions", ".contention")]
            )
            for target in filter(described.__contains__, targets):
                page, there = self.env.docname, described[target]
                link = make_refnode(
                    self.app.builder, page, there.docname, there.node_id, node.deepcopy(), target
                )
                node.replace_self(link)
                break


def _parents(node: nodes.Node) -> list[nodes.Node]:
    parents = []
    while node.parent is not None:
        node = node.parent
        parents.append(node)
    return parents


def setup(app: Sphinx) -> None:
    app.add_post_transform(LinkNames)
