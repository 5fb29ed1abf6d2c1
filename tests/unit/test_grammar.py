"""A number before the noun that it counts: what people read has "1 node", never "1 nodes"."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from megascale_job.visible import agreed, counted

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
ROOMS = ("services", "clients")

# What messages count. Bytes, times and lengths are quantities of a unit and are not among them.
NOUNS = (
    *("attempts", "blocks", "calls", "cards", "checkpoints", "chunks"),
    *("commands", "commits", "connections", "copies", "days", "devices", "documents"),
    *("edges", "elements", "entries", "errors", "evaluations", "events", "experts", "failures"),
    *("faults", "files", "flows", "folders", "groups", "heads", "hosts", "hours", "incidents"),
    *("jobs", "kinds", "labels", "layers", "lines", "links", "losses", "machines", "members"),
    *("messages", "micro-batches", "minutes", "nodes", "numbers", "operators"),
    *("options", "pairs", "parameters", "parts", "pieces", "ports", "problems", "processes"),
    *("processors", "products", "racks", "ranks", "readers", "records", "recoveries"),
    *("repairs", "replicas", "restarts", "results", "retries", "rows"),
    *("samples", "sequences", "series", "settings", "shards", "shares", "silences"),
    *("slots", "sources", "spans", "spares", "stages", "states", "steps", "streams", "switches"),
    *("tasks", "tensors", "times", "tokens", "traces", "updates", "users"),
    *("values", "variables", "waiters", "windows", "workers"),
)
# One or two words may stand between: "3 healthy spare nodes". A noun or a verb in s may not.
_APART = "of|and|or|on|in|to|for|with|by|at|than|where|from|the|are|not|outside|through|between"
BETWEEN = rf"(?:(?!(?:{_APART})\b)[a-z-]*[a-rt-z] ){{0,2}}"
COUNTED = re.compile(rf"^ {BETWEEN}({'|'.join(NOUNS)})\b(?!/)")
TEMPLATE = re.compile(rf"(?:\{{\w*\}}|%d)(?= {BETWEEN}({'|'.join(NOUNS)})\b)")
DIGITS = re.compile(r"\.[1-9]\d*[a-z]")

# What the scan finds and is right: no number, or one that is never one.
REASONS = {
    ("sections/code.py", "{len(environment.secrets)} variables"): "more than a limit",
    ("sections/data.py", "{len(sources)} sources"): "more than a limit",
    ("sections/optimizer.py", "{len(options)} options"): "more than a limit",
    ("sections/parallelism.py", "{len(sizes.stage_layers)} entries"): "more than a limit",
    ("megascale_job/config.py", "{len(config.labels)} labels"): "more than a limit",
    ("export/stored.py", "{shown(layers)} layers"): "what a damaged file says, as it says it",
    ("spans/outliers.py", "{self.op} spans"): "the name of a kind of spans",
    ("analysis/hot_experts.py", "{self.op} spans"): "the name of a kind of spans",
    ("megascale_cli/job_template.py", "{size} parameters"): "a size such as 7.0 B",
    ("commands/node.py", "{device} devices"): "the kind of the devices",
    ("commands/up.py", "{restarts} times"): "MAX_RESTARTS",
    ("jobs/jobs.py", "{workers} workers"): "one worker has a sentence of its own",
    ("diagnostics/rank_checks.py", "{world_size or len(targets)} ranks"): "a class of baselines",
    ("node_tests/all_to_all.py", "{world} ranks"): "a class of baselines, and two at least",
    ("node_tests/all_to_all.py", "{size} elements"): "a message of 1 MiB at least",
    ("megascale_trainer/rates.py", "{shapes.sequence} tokens"): "a sequence of 1,024 at least",
    ("megascale_trainer/rates.py", "{dist.get_world_size()} ranks"): "a bandwidth needs two",
    ("megascale_cli/jobfile.py", "{_count(facts['parameters'])} parameters"): "such as 7.0 B",
    ("megascale_cli/jobfile.py", "{_count(facts['tokens_of_the_run'])} tokens"): "such as 2 T",
    ("megascale_dashboard/incident_view.py", "{len(names)} nodes"): "one node has its own sentence",
}


def findings(source: str) -> Iterator[tuple[int, str]]:
    """Lines and places where a number comes right before a noun in the plural."""
    decided = set[int]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.IfExp):  # comes before its arms
            arms = [arm for arm in (node.body, node.orelse) if isinstance(arm, ast.JoinedStr)]
            if arms and re.search(r"[=>] 1$", ast.unparse(node.test)):
                decided.update(map(id, arms))
        elif isinstance(node, ast.JoinedStr) and id(node) not in decided:
            for number, rest in zip(node.values, node.values[1:], strict=False):
                if isinstance(number, ast.FormattedValue) and isinstance(rest, ast.Constant):
                    found = COUNTED.match(str(rest.value))
                    if found and not cannot_be_one(number):
                        yield number.lineno, f"{{{ast.unparse(number.value)}}}{found[0]}"
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            for found in TEMPLATE.finditer(node.value):
                yield node.lineno, f"{found[0]} {found[1]}"


def findings_of_pages(source: str) -> list[str]:
    """The same of the dashboard's scripts."""
    scripts = re.compile(rf"\$\{{(?!counted\()[^{{}}]*\}} {BETWEEN}({'|'.join(NOUNS)})\b(?!/)")
    return [found[0] for found in scripts.finditer(source)]


def cannot_be_one(number: ast.FormattedValue) -> bool:
    """Whether it is counted, is a limit with a name, or has digits after its point."""
    value = ast.unparse(number.value)
    spec = ast.unparse(number.format_spec) if number.format_spec else ""
    constant = value.rpartition(".")[2].lstrip("_")
    return value.startswith("counted(") or constant.isupper() or bool(DIGITS.search(spec))


def test_no_text_says_one_nodes() -> None:
    reasons = set(REASONS)
    found = []
    for path in sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        for line, place in findings(path.read_text()):
            key = ("/".join(path.parts[-2:]), place)
            reasons.discard(key)
            if key not in REASONS:
                found.append(f"{path.relative_to(ROOT)}:{line}: {place}: use counted(number, noun)")
    assert found == []
    assert reasons == set()  # a reason for what is no longer there is deleted


def test_no_page_says_one_nodes() -> None:
    paths = sorted((ROOT / "clients/dashboard").rglob("static/[!u]*.js"))  # not uplot
    assert len(paths) > 5
    assert [place for path in paths for place in findings_of_pages(path.read_text())] == []
    assert findings_of_pages("`${n} nodes, ${counted(n, 'node')}, ${number(m)} spare nodes`") == [
        "${n} nodes",
        "${number(m)} spare nodes",
    ]


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ('f"{n} nodes"', 1),
        ('f"{len(nodes):,} healthy spare nodes stand by"', 1),
        ('f"{a} micro-batches of {b} steps"', 2),
        ('f"after {n:g} hours"', 1),
        ('"{n} restarts".format(n=n)', 1),
        ('"%d lines" % n', 1),
        ("f\"{counted(n, 'node')} stand by\"", 0),
        ('f"at most {MAX_NODES} nodes"', 0),
        ('f"{limits.MAX_NODES} nodes"', 0),
        ('f"{n:.2f} hours"', 0),
        ('f"{speed} tokens/s"', 0),
        ('f"{n} of the nodes"', 0),
        ('"1 node" if n == 1 else f"{n} nodes"', 0),
        ('f"{n} nodes" if n > 1 else "1 node"', 0),
        ('f"{n} nodes" if found else "none"', 1),
    ],
)
def test_the_scan_finds_numbers_before_plurals(source: str, count: int) -> None:
    assert len(list(findings(source))) == count


@pytest.mark.parametrize(
    ("number", "thing", "shown"),
    [
        (1, "node", "1 node"),
        (0, "entry", "0 entries"),
        (2, "switch", "2 switches"),
        (12345678, "loss", "12,345,678 losses"),
        (1.0, "hour", "1 hour"),
        (24.0, "hour", "24 hours"),
        (0.5, "day", "0.5 days"),
    ],
)
def test_a_number_and_its_noun_agree(number: float, thing: str, shown: str) -> None:
    assert counted(number, thing) == shown


def test_a_verb_agrees_with_what_is_counted() -> None:
    verbs = ("are", "have", "were", "stand")
    assert [agreed(1, verb) for verb in verbs] == ["is", "has", "was", "stands"]
    assert [agreed(number, verb) for verb in verbs for number in (0, 2)] == [
        verb for verb in verbs for _ in range(2)
    ]
