"""Everything else is in setup.cfg. The variable PROJECT_URL of the environment is the address of
the repository, for the description: a package index follows no relative links."""

import os
import re
from pathlib import Path

from setuptools import setup

#: Address of the repository, without a slash at its end; empty if it has none yet.
URL = os.environ.get("PROJECT_URL", "").rstrip("/")


def description() -> str:
    """README.md with links that work anywhere. Without a URL: the text of a link without the link,
    and without the part that only shows pictures, make targets and the list of pages."""
    text = Path("README.md").read_text(encoding="utf-8")
    relative = r"\]\((?![a-z]+:|#)"
    if URL:
        text = re.sub(r"(!\[[^\]]*)" + relative, rf"\1]({URL}/raw/HEAD/", text)
        return re.sub(relative, f"]({URL}/blob/HEAD/", text)
    text = text.partition("\n## See it\n")[0]
    text = re.sub(r"!\[[^\]]*" + relative + r"[^)]*\)\n*", "", text)
    return re.sub(r"\[([^\]]+)" + relative + r"[^)]*\)", r"\1", text)


def project_urls() -> dict[str, str]:
    pages = {"Documentation": "tree/HEAD/docs", "Changelog": "blob/HEAD/CHANGELOG.md"}
    pages["Issues"] = "issues"
    return {"Source": URL, **{name: f"{URL}/{path}" for name, path in pages.items()}} if URL else {}


setup(
    long_description=description(),
    long_description_content_type="text/markdown",
    project_urls=project_urls(),
)
