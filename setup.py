"""Everything else is in setup.cfg. A package index follows no relative links of the description."""

import configparser
import re
from pathlib import Path

from setuptools import setup


def description() -> str:
    """README.md with links that work anywhere: to the URL ``Source`` among the ``project_urls`` of
    setup.cfg. As long as there is none: the text of the link without the link, and without the part
    that only shows pictures, make targets and the list of pages."""
    text = Path("README.md").read_text(encoding="utf-8")
    config = configparser.ConfigParser()
    config.read("setup.cfg", encoding="utf-8")
    lines = config.get("metadata", "project_urls", fallback="").strip().splitlines()
    urls = dict(re.split(r"\s*=\s*", line, maxsplit=1) for line in lines)
    relative = r"\]\((?![a-z]+:|#)"
    if "Source" in urls:
        source = urls["Source"].rstrip("/")
        text = re.sub(r"(!\[[^\]]*)" + relative, rf"\1]({source}/raw/HEAD/", text)
        return re.sub(relative, f"]({source}/blob/HEAD/", text)
    text = text.partition("\n## See it\n")[0]
    text = re.sub(r"!\[[^\]]*" + relative + r"[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)" + relative + r"[^)]*\)", r"\1", text)


setup(long_description=description(), long_description_content_type="text/markdown")
