"""Makes the description of README.md, as a package index follows no relative links; everything else
is in pyproject.toml."""

import re
from pathlib import Path

from setuptools import setup

#: What the owner of the repository has to replace in the URLs of pyproject.toml.
PLACEHOLDER = "OWNER"


def source_url(pyproject: str) -> str:
    """The address of the repository, without a slash at its end; empty if it has none yet."""
    url = re.search(r'^Source = "(.+?)/?"$', pyproject, re.MULTILINE)[1]
    return "" if f"/{PLACEHOLDER}/" in url else url


def description(readme: str, url: str) -> str:
    """README.md with links that work anywhere. Without a URL: the text of a link without the link,
    and without the part that only shows pictures, make targets and the list of pages."""
    relative = r"\]\((?![a-z]+:|#)"
    if url:
        readme = re.sub(r"(!\[[^\]]*)" + relative, rf"\1]({url}/raw/HEAD/", readme)
        return re.sub(relative, f"]({url}/blob/HEAD/", readme)
    readme = readme.partition("\n## See it\n")[0]
    readme = re.sub(r"!\[[^\]]*" + relative + r"[^)]*\)\n*", "", readme)
    return re.sub(r"\[([^\]]+)" + relative + r"[^)]*\)", r"\1", readme)


def read(name: str) -> str:
    return Path(name).read_text(encoding="utf-8")


setup(
    long_description=description(read("README.md"), source_url(read("pyproject.toml"))),
    long_description_content_type="text/markdown",
)
