"""Hooks of mkdocs.yml: the README is the site's front page, and links stay on the site.

Pages link to source files, which GitHub-like viewers show and the site does not have. Such a link
becomes its text, which names the file.
"""

from __future__ import annotations

import posixpath
import re
from typing import Any

FRONT = "index.md"
_FENCE = re.compile(r"\s*(```|~~~)")
_BLOCK = re.compile(r"(-|\d+\.) |\|")
_OPEN = re.compile(r"\s*$|\s*(-|\d+\.) |\s*\||\s{2,}\S")  # an empty line, or an item or row before
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^()\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add README.md as the front page."""
    from mkdocs.structure.files import File

    readme = posixpath.join(posixpath.dirname(config.config_file_path), "README.md")
    with open(readme, encoding="utf-8") as file:
        content = for_site(file.read(), "README.md")
    files.append(File.generated(config, FRONT, content=content))
    return files


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Keep the links of a page of docs/ that lead to other pages of docs/."""
    source = page.file.src_uri
    return markdown if source == FRONT else for_site(markdown, f"docs/{source}")


def for_site(markdown: str, path: str) -> str:
    """The text of the page at ``path`` (from the repository's root) as the site shows it."""
    lines, code = [""], False
    for line in markdown.splitlines():
        if not code and _BLOCK.match(line) and not _OPEN.match(lines[-1]):
            lines.append("")  # GitHub needs no empty line before a list or a table
        if _FENCE.match(line):
            code = not code
        lines.append(line if code else _LINK.sub(lambda link: _link(link, path), line))
    return "\n".join(lines[1:]) + "\n"


def _link(link: re.Match[str], path: str) -> str:
    text, target = link.groups()
    if re.match(r"[a-z]+:|#", target):
        return link[0]
    file, hash_sign, anchor = target.partition("#")
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
    if found == "README.md":
        found = f"docs/{FRONT}"
    if not (found.startswith("docs/") and found.endswith(".md")):
        # A folder of pages is linked by its README.
        if not (found.startswith("docs/") and not posixpath.splitext(found)[1]):
            return text
        found += "/README.md"
    here = "docs" if path == "README.md" else posixpath.dirname(path)
    return f"[{text}]({posixpath.relpath(found, here)}{hash_sign}{anchor})"
