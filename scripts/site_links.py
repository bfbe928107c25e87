"""Hooks of mkdocs: a site has only the pages of `docs/`, so links to other files and to folders
lead to the repository; ids of headings begin with a letter, as selectors have to; `llms.txt` lists
the pages for language models (llmstxt.org), with the descriptions of the index.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from markdown.extensions.toc import slugify  # type: ignore[import-untyped]

_ROW = re.compile(
    r"^\| \[(?P<title>[^\]]+)\]\((?P<page>[^)#]+\.md)\) \| (?P<about>.+?) \|$", re.MULTILINE
)
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


def on_post_build(config: Any) -> None:
    """Called by mkdocs behind the last page."""
    index = (Path(config.docs_dir) / "index.md").read_text(encoding="utf-8")
    Path(config.site_dir, "llms.txt").write_text(llms_text(config, index), encoding="utf-8")


def llms_text(config: Any, index: str) -> str:
    """The title, the description, and a link for each row of the index."""
    base = config.site_url or ""
    links = [
        f"- [{row['title']}]({base}{row['page'].removesuffix('.md')}.html): {row['about']}"
        for row in _ROW.finditer(index)
    ]
    head = f"# {config.site_name}\n\n> {config.site_description}\n\n## Docs\n\n"
    return head + "\n".join(links) + "\n"
