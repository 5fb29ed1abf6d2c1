"""Draw the rooms and their imports in docs/architecture.md, from the source.

python -m docs.generate_rooms [--check]
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping

from docs import imports, pages

PAGE = pages.DOCS / "architecture.md"


def text() -> str:
    """One picture of the packages, then one for each package that has rooms inside."""
    graph = imports.imports()
    lines = ["### Packages", "", *_picture("", graph, imports.children("", graph))]
    for package in imports.packages(graph):
        rooms = imports.children(package, graph)
        lines += [f"### {package}", ""]
        lines += _picture(package, graph, imports.reduced(_with_arrows(package, graph, rooms)))
    return "\n".join(lines)


def _with_arrows(
    package: str, graph: Mapping[str, set[str]], rooms: imports.Graph
) -> imports.Graph:
    """The packages among the rooms, and single modules with an arrow from or to a package."""
    inner = {room for room in rooms if _is_package(package, room, graph)}
    tied = {room for room, targets in rooms.items() if targets & inner}
    tied |= {target for room in inner for target in rooms[room]}
    shown = inner | tied
    return {room: targets & shown for room, targets in rooms.items() if room in shown}


def _picture(package: str, graph: Mapping[str, set[str]], rooms: imports.Graph) -> Iterator[str]:
    yield from ("```mermaid", "graph TD")
    for room in sorted(rooms):
        label = f"{room}/" if package and _is_package(package, room, graph) else room
        yield f'    {_id(room)}["{label}"]'
    for room in sorted(rooms):
        for target in sorted(rooms[room]):
            yield f"    {_id(room)} --> {_id(target)}"
    yield from ("```", "")


def _is_package(package: str, room: str, graph: Mapping[str, set[str]]) -> bool:
    return any(module.startswith(f"{package}.{room}.") for module in graph)


def _id(room: str) -> str:
    """A name in the picture's source: some words, such as ``end``, are reserved in mermaid."""
    return f"room_{room.replace('.', '_')}"


if __name__ == "__main__":
    sys.exit(pages.run(PAGE, text))
