"""Write docs/alarms.md and the table of rules in docs/switches.md, from the records of the core.

python -m docs.generate_alarms [--check]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence

from docs import pages
from megascale_driver.core import machine
from megascale_driver.core.values.reasons import REASONS, SEVERITIES, Reason
from megascale_driver.core.values.rules import RULES

PAGE = pages.DOCS / "alarms.md"
RULES_PAGE = pages.DOCS / "switches.md"
MODES = {"ENFORCE": "enforced", "OBSERVE": "observed"}
# A record's link to a heading leads to the first of these pages that has it.
RUNBOOK = ("alarms.md", "operations.md", "storage.md", "switches.md", "control-plane.md")


def text() -> str:
    """A list of contents, then one entry for each reason; the most urgent ones first."""
    assert callable(machine.step), "loading the state machine has loaded every detector"
    urgent = [*reversed(SEVERITIES), None]
    groups = [
        (level, [one for one in REASONS.values() if one.severity == level]) for level in urgent
    ]
    lines = []
    for level, group in groups:
        names = " · ".join(f"[{one.name}](#{one.name.lower()})" for one in group)
        lines += [f"- **{level or 'routine'}**: {names}"]
    for level, group in groups:
        lines += ["", f"## {(level or 'routine').capitalize()}", ""]
        for one in group:
            lines += _entry(one)
    return "\n".join(lines)


def _entry(one: Reason) -> Iterator[str]:
    yield f"### {one.name}"
    yield f"- **What happened**: {_sentence(one.meaning)}"
    rule = RULES.get(one.rule)
    mode = "" if rule is None else f" (rule `{rule.name}`, {MODES[rule.default]} by default)"
    if response := one.response or (rule.effect if rule is not None else ""):
        yield f"- **What the system does**{mode}: {_sentence(response)}"
    yield f"- **What you can do**: {_sentence(one.remedy)}"
    yield ""


def _sentence(markdown: str) -> str:
    """A record's text as a sentence, with its links to headings wherever those are."""
    text = re.sub(r"\]\(#([\w-]+)\)", lambda link: f"]({_page_of(link[1])}#{link[1]})", markdown)
    return f"{text[0].upper()}{text[1:]}."


def _page_of(anchor: str) -> str:
    """Raises ValueError: no page of the runbook has the heading."""
    for name in RUNBOOK:
        headings = re.findall(r"(?m)^#+ (.+)$", (pages.DOCS / name).read_text(encoding="utf-8"))
        if anchor in (re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings):
            return name
    raise ValueError(f"no page of {', '.join(RUNBOOK)} has the heading #{anchor}")


def rules() -> str:
    """One row for each rule."""
    rows = ((f"`{one.name}`", one.effect, MODES[one.default]) for one in RULES.values())
    return "\n".join(pages.table(("rule", "what it does when it is enforced", "default"), rows))


def main(arguments: Sequence[str] | None = None) -> int:
    """Write both pages; with --check only compare them."""
    return pages.run(PAGE, text, arguments) | pages.run(RULES_PAGE, rules, arguments)


if __name__ == "__main__":
    sys.exit(main())
