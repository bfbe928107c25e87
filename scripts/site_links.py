"""Hooks of mkdocs: a site has only the pages of `docs/`, so links to other files and to folders
lead to the repository; ids of headings begin with a letter, as selectors have to.
"""

import posixpath
import re
from typing import Any

from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

_LINK = re.compile(r"\]\((?P<path>(?!https?://|#)[^)#\s]+)(?P<anchor>#[^)]*)?\)")


def on_config(config: Any) -> None:
    """Called by mkdocs before the first page."""
    config.mdx_configs["toc"] = {**config.mdx_configs.get("toc", {}), "slugify": heading_id}


def heading_id(text: str, separator: str) -> str:
    """The id of a heading, such as `step-1-install` of "1. Install"."""
    plain: str = slugify(text, separator)
    return f"step{separator}{plain}" if plain[:1].isdigit() else plain


def on_page_markdown(markdown: str, page: Any, config: Any, **_: object) -> str:
    """Called by mkdocs with the text of each page; returns it with these links absolute."""
    folder = posixpath.join("docs", posixpath.dirname(page.file.src_uri))

    def leading_out(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(folder, link["path"]))
        is_folder = link["path"].endswith("/")
        if path.startswith("docs/") and not is_folder:
            return link.group()
        kind = "tree" if is_folder else "blob"
        return f"]({config.repo_url}{kind}/main/{path}{link['anchor'] or ''})"

    return _LINK.sub(leading_out, markdown)
