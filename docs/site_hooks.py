"""Hooks of mkdocs.yml: the README is the site's front page, and links stay on the site.

Pages link to source files, which GitHub-like viewers show and the site does not have. Such a link
becomes its text, which names the file. Pictures of benchmarks/results, which pages show, are copied
to the site.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

FRONT = "index.md"
RESULTS, PICTURES = "benchmarks/results/", "images/"
_FENCE = re.compile(r"\s*(```|~~~)")
_BLOCK = re.compile(r"(-|\d+\.) |\|")
_OPEN = re.compile(r"\s*$|\s*(-|\d+\.) |\s*\||\s{2,}\S")  # an empty line, or an item or row before
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^()\s]+)\)")
_IMAGE = re.compile(r"(!\[[^\]]*\])\(([^()\s]+)\)")


def on_files(files: Any, *, config: Any) -> Any:
    """Add README.md as the front page, and the pictures of results."""
    from mkdocs.structure.files import File

    root = Path(config.config_file_path).parent
    content = for_site((root / "README.md").read_text(encoding="utf-8"), "README.md")
    files.append(File.generated(config, FRONT, content=content))
    for picture in sorted((root / RESULTS).glob("*.png")):
        shown = PICTURES + picture.name
        files.append(File.generated(config, shown, abs_src_path=str(picture)))
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
        lines.append(line if code else _for_site(line, path))
    return "\n".join(lines[1:]) + "\n"


def _for_site(line: str, path: str) -> str:
    linked = _LINK.sub(lambda link: _link(link, path), line)
    return _IMAGE.sub(lambda image: _image(image, path), linked)


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


def _image(image: re.Match[str], path: str) -> str:
    alt, target = image.groups()
    found = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if found.startswith(RESULTS):
        found = f"docs/{PICTURES}{posixpath.basename(found)}"
    here = "docs" if path == "README.md" else posixpath.dirname(path)
    return f"{alt}({posixpath.relpath(found, here)})"
