"""The command line without a cluster: help, exit statuses, lazy commands."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
import typer.main
from tests.harness import command_line
from typer.testing import CliRunner

from megascale_cli import app, exits, plugins
from megascale_cli.app import build_app
from megascale_cli.planning import PLUGINS
from megascale_client import (
    AlreadyExists,
    ClusterNotFound,
    FieldProblem,
    InvalidJob,
    InvalidRequest,
    MegascaleError,
    NotAllowed,
    NotFound,
    ServiceFailure,
    Unavailable,
)

COMMANDS = [
    "submit",
    "jobs",
    "job",
    "watch",
    "init",
    "plan",
    "diagnose",
    "cordon",
    "uncordon",
    "logs",
    "explain",
    "heat",
    "topology",
    "why",
    "timeline",
    "events",
    "profile",
    "clone",
    "config",
    "suspend",
    "resume",
    "cancel",
    "restart",
    "update",
    "delete",
    "nodes",
    "drain",
    "evict",
    "policy",
    "quota",
    "reset-breaker",
    "cluster",
    "demo",
    "version",
    "up",
    "certs",
    "dashboard",
    "data",
    "generate",
    "pipeline",
    "checkpoint",
]


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> CliRunner:
    """A runner in an empty folder, with no cluster to be found."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MEGASCALE_RUN_FOLDER", raising=False)
    return CliRunner()


def test_only_the_command_that_runs_is_put_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them take more processor time than most commands use."""
    made: list[str] = []
    single = plugins.single

    def counted(function: Callable[..., Any], name: str, **settings: Any) -> Any:
        made.append(name)
        return single(function, name, **settings)

    monkeypatch.setattr(plugins, "single", counted)
    monkeypatch.setattr(app, "single", counted)
    assert CliRunner().invoke(build_app(), ["version"]).exit_code == exits.OK
    assert made == ["version"]
    unknown = CliRunner().invoke(build_app(), ["versio"])
    assert "Did you mean 'version'" in unknown.output and made == ["version"]
    listed = CliRunner().invoke(build_app(), ["--help"])
    assert listed.exit_code == exits.OK and "evict" in listed.output
    assert {"up", "data"} < set(made) and not {"submit", "evict"} & set(made)


# What every command imports of the CLI; a command adds its own module.
BASE = {
    "__main__",
    "app",
    "exits",
    "options",
    "output",
    "plugins",
    "usage",
}


@pytest.mark.parametrize(
    ("arguments", "own"),
    [("--version", set()), ("jobs", {"jobs", "watch"}), ("cordon n1 --reason x", {"nodes"})],
)
def test_a_command_imports_its_own_module_alone(
    tmp_path: Path, arguments: str, own: set[str]
) -> None:
    """Imports are most of the time of a command: 0.2 s of a processor for --version."""
    program = (
        "import sys\n"
        f"sys.argv = ['megascale', *{arguments.split()!r}]\n"
        "from megascale_cli.__main__ import main\n"
        "try:\n main()\nexcept SystemExit: pass\n"
        "print('LOADED', *sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    loaded = set(done.stdout.partition("LOADED ")[2].split())
    ours = {name.partition(".")[2] for name in loaded if name.startswith("megascale_cli.")}
    assert ours == BASE | own
    slow = {
        "numpy",
        "torch",
        "http.server",
        "rich.markdown",
        "typer.testing",
        "xxhash",
        "multiprocessing",
    }
    assert not slow & loaded
    assert {name for name in loaded if name.startswith("megascale_")} == {
        *("megascale_cli", "megascale_client", "megascale_job", "megascale_job.visible"),
        *(name for name in loaded if name.startswith(("megascale_cli.", "megascale_client."))),
    }


def test_help_lists_every_command_without_loading_a_service(tmp_path: Path) -> None:
    program = (
        "import sys\nfrom megascale_cli.app import build_app\n"
        "try:\n build_app()(['--help'], prog_name='megascale')\nexcept SystemExit: pass\n"
        "names = ('driver', 'executor', 'trainer', 'checkpoint', 'common')\n"
        "modules = [f'megascale_{name}' for name in names] + ['torch']\n"
        "print('LOADED', [name for name in modules if name in sys.modules])\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert "LOADED []" in done.stdout
    for command in COMMANDS:
        assert f" {command} " in done.stdout
    assert "Exit status" in done.stdout


ROOT: Any = typer.main.get_command(build_app())
PARTS = {
    "data": ["tokenize", "inspect"],
    "pipeline": ["draw"],
    "checkpoint": [
        "list",
        "fetch",
        "show",
        "verify",
        "gc",
        "pin",
        "unpin",
        "repair",
        "export",
        "import",
    ],
    "config": ["show", "diff"],
    "certs": ["init", "issue"],
}
WHOLE = [
    name if not part else f"{name} {part}" for name in COMMANDS for part in PARTS.get(name, [""])
]


@pytest.mark.parametrize("command", WHOLE)
def test_every_command_has_help_with_an_example(command: str) -> None:
    answer = command_line.command(*command.split(), "--help")
    assert answer.status == 0
    assert f"Example: megascale {command}" in answer.text
    assert "--json" in answer.text


def pages(path: list[str], command: Any) -> Iterator[list[str]]:
    """The words of a command and of all below it, in front of --help."""
    behind = getattr(command, "behind", None)
    if behind is not None and path != ["plan"]:
        command = behind([path[-1]])[0]
    yield path
    for name, below in getattr(command, "commands", {}).items():
        yield from pages([*path, name], below)


def test_a_help_is_whole_on_80_columns(runner: CliRunner) -> None:
    commands = build_app()
    found = [page for name, one in ROOT.commands.items() for page in pages([name], one)]
    for page in (*found, *(["plan", word] for word in PLUGINS)):
        shown = runner.invoke(commands, [*page, "--help"], env={"COLUMNS": "80"}).output
        assert "\u2026" not in shown, f"{page}: the name of an option, or a word, is cut"
        assert max(map(len, shown.splitlines())) <= 80, page
        # A line break within a paragraph stands where the next word had no room.
        prose = shown.partition("╭")[0].splitlines()[3:]
        for line, following in itertools.pairwise(prose):
            if line.strip() and following.strip() and not following.startswith("  "):
                assert len(line.rstrip()) + 1 + len(following.split()[0]) > 79, (page, line)


def test_the_first_questions_have_a_line_each_on_80_columns(runner: CliRunner) -> None:
    shown = runner.invoke(build_app(), ["--help"], env={"COLUMNS": "80"}).output
    questions = app.GUIDE.partition("[/bold]\n")[2].partition("\n\n")[0].splitlines()
    assert len(questions) > 10
    assert [line.strip() for line in questions] == [
        line.strip() for line in shown.splitlines() if re.search(r"^ .*\S {2,}megascale ", line)
    ]


def test_help_answers_a_newcomers_first_questions(runner: CliRunner) -> None:
    output = runner.invoke(build_app(), ["-h"], env={"COLUMNS": "120"}).output
    for command in (
        "megascale submit job.yaml",
        "megascale watch NAME",
        "megascale explain NAME",
        "megascale demo",
        "megascale logs NAME --rank 5",
        "megascale profile NAME --steps 2",
        "megascale data tokenize MY_TEXTS",
        "megascale up --nodes 2",
        "megascale --install-completion",
    ):
        assert command in output


def test_completion_is_installed_for_the_shell_in_use(tmp_path: Path) -> None:
    environment = {**os.environ, "HOME": str(tmp_path)}
    program = "from megascale_cli.__main__ import main; main()"
    command = ["bash", "-c", f'{sys.executable} -c "{program}" --install-completion; exit $?']
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "_MEGASCALE_COMPLETE" in (tmp_path / ".bash_completions" / "megascale.sh").read_text()


def test_entry_points_and_the_lists_of_our_commands_agree() -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    ours = {
        **plugins.KNOWN,
        **plugins.PLANNING,
        "checkpoint": plugins.CHECKPOINT,
    }
    assert project["project"]["entry-points"][plugins.GROUP] == {
        name: known.target
        for name, known in ours.items()
        if not known.target.startswith("megascale_cli.")  # imported as they are
    }


def test_init_and_plan_lead_from_nothing_to_what_a_job_needs(runner: CliRunner) -> None:
    words = ["init", "--ranks", "8", "--output"]
    written = runner.invoke(build_app(), [*words, "First Try.yaml"])
    assert (written.exit_code, "megascale plan First Try.yaml" in written.output) == (
        exits.OK,
        True,
    )
    shown = runner.invoke(
        build_app(), ["plan", "First Try.yaml", "--devices-per-node", "4"], env={"COLUMNS": "200"}
    )
    assert shown.exit_code == exits.OK
    lines = [
        "first-try",
        "853,504 parameters",
        "FLOPs a token",
        "2,048 tokens a step",
        "8 ranks: 2 nodes of 4 devices",
    ]
    for line in (*lines, "checkpoint   9.8 MiB"):
        assert line in shown.output
    text = Path("First Try.yaml").read_text()
    assert "#tp: true" in text and "#pp: true" in text, "the file shows the defaults"
    sizes = text.replace("#tp: 1\n", "tp: 2\n").replace("#pp: 1\n", "pp: 2\n")
    Path("cut.yaml").write_text(sizes.replace(" dp: 8\n", " dp: 2\n"))
    shown = runner.invoke(build_app(), ["plan", "cut.yaml"], env={"COLUMNS": "200"})
    assert "pipeline stage 1: parameters" in shown.output
    assert shown.output.count(", peer memory 256.0 KiB") == 2, (
        "128 tokens, 2 sequences, 128 columns, fp32, two slots"
    )
    plain = Path("cut.yaml").read_text()
    plain = plain.replace("#tp: true", "tp: false").replace("#pp: true", "pp: false")
    Path("plain.yaml").write_text(plain)
    shown = runner.invoke(build_app(), ["plan", "plain.yaml"], env={"COLUMNS": "200"})
    assert shown.exit_code == exits.OK and "peer memory" not in shown.output
    as_json = json.loads(runner.invoke(build_app(), ["plan", "First Try.yaml", "--json"]).output)
    assert (as_json["parameters"], as_json["refused"]) == (853_504, [])
    on_stdout = runner.invoke(build_app(), [*words, "-", "--name", "first-try"]).output
    assert on_stdout == Path("First Try.yaml").read_text()
    too_large = runner.invoke(
        build_app(), ["plan", "First Try.yaml", "--device-memory-gib", "0.001"]
    )
    assert too_large.exit_code == exits.USAGE
    assert "refused trainer.parallelism" in too_large.output


def test_commands_are_found_without_the_packages_metadata(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from a source tree with PYTHONPATH alone."""
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [])
    assert runner.invoke(build_app(), ["init"]).exit_code == exits.OK
    assert runner.invoke(build_app(), ["plan", "job.yaml"]).exit_code == exits.OK
    assert "tokenize" in runner.invoke(build_app(), ["data", "--help"]).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["jobs"],
        ["job", "x"],
        ["watch", "x"],
        ["logs", "x"],
        ["nodes"],
        ["explain", "x"],
        ["heat", "x"],
        ["topology", "x"],
        ["why", "x"],
        ["timeline", "x"],
        ["events", "x"],
        ["profile", "x"],
        ["evict", "n1", "--reason", "r"],
        ["cancel", "x", "--reason", "r"],
        ["suspend", "x", "--reason", "r"],
        ["resume", "x", "--reason", "r"],
        ["delete", "x", "--reason", "r"],
        ["checkpoint", "list", "x"],
        ["cluster"],
        ["clone", "x"],
        ["config", "show", "x"],
    ],
)
def test_no_cluster_is_an_error_with_a_remedy(runner: CliRunner, arguments: list[str]) -> None:
    result = runner.invoke(build_app(), arguments)
    assert result.exit_code == exits.UNAVAILABLE
    assert "megascale up" in result.stderr
    assert "--cluster" in result.stderr
    as_json = runner.invoke(build_app(), [*arguments, "--json"])
    assert as_json.exit_code == exits.UNAVAILABLE
    assert json.loads(as_json.stderr)["kind"] == "ClusterNotFound"


def test_a_bad_job_file_is_refused_before_a_cluster_is_searched(
    runner: CliRunner, tmp_path: Path
) -> None:
    (tmp_path / "job.yaml").write_text("name: a\ntrainer: {model: {layerz: 2}}\n")
    result = runner.invoke(build_app(), ["submit", "job.yaml"])
    assert result.exit_code == exits.USAGE
    assert "job.yaml" in result.stderr
    assert "trainer.model.layerz: unknown field; did you mean 'layers'?" in result.stderr
    as_json = json.loads(runner.invoke(build_app(), ["submit", "job.yaml", "--json"]).stderr)
    assert as_json["problems"][0]["field"] == "trainer.model.layerz"


@pytest.mark.parametrize(
    "arguments",
    [
        ["no-such-command"],
        ["evict", "n1"],
        ["cancel", "x"],
        ["suspend", "x"],
        ["delete", "x"],
        ["logs", "x", "--rank", "-1"],
        ["profile", "x", "--ranks", "0;1"],
        ["jobs", "--wrong"],
    ],
)
def test_wrong_usage_ends_with_2(runner: CliRunner, arguments: list[str]) -> None:
    assert runner.invoke(build_app(), arguments).exit_code == exits.USAGE


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (InvalidJob([FieldProblem("name", "empty")]), exits.USAGE),
        (ClusterNotFound("x"), exits.UNAVAILABLE),
        (Unavailable("x"), exits.UNAVAILABLE),
        (NotFound("x"), exits.NOT_FOUND),
        (AlreadyExists("x"), exits.REFUSED),
        (NotAllowed("x"), exits.REFUSED),
        (ServiceFailure("x"), exits.FAILED),
    ],
)
def test_each_error_has_its_exit_status(error: MegascaleError, status: int) -> None:
    assert exits.status_of(error) == status


def test_version_is_that_of_the_package(runner: CliRunner) -> None:
    human = runner.invoke(build_app(), ["version"])
    machine = runner.invoke(build_app(), ["version", "--json"])
    assert human.output.strip() == f"megascale {json.loads(machine.output)['version']}"


def test_an_absent_command_names_what_to_install() -> None:
    plugin = plugins.Plugin("x", extra="executor")
    with pytest.raises(InvalidRequest, match=r"pip install 'megascale\[executor\]'"):
        plugins.run_plugin("not-there", plugin, [], "megascale not-there")


def test_a_command_whose_import_fails_names_what_to_install(tmp_path: Path) -> None:
    # numpy stands for what the extra would bring; the command is loaded in a process that lacks it.
    program = (
        "import sys\nsys.modules['numpy'] = None\n"
        "from megascale_cli.app import build_app\n"
        "build_app()(['data', 'tokenize', 'x'], prog_name='megascale')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == exits.USAGE
    assert "megascale[executor]" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_forwarded_command_gets_its_own_arguments() -> None:
    answer = command_line.command("up", "--dry-run", "--nodes", "2", "--json")
    assert json.loads(answer.stdout)["nodes"] == ["n1", "n2"]


class Damaged(Exception):
    """What a service raises: a gRPC code and a stable word."""

    reason, code = "DAMAGED", "DATA_LOSS"


class Misused(Exception):
    """What a package without gRPC raises."""

    reason = "BAD_DATA"


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (Damaged("shard-1 is cut short"), exits.FAILED, "DAMAGED"),
        (Misused("corpus.idx is not an index"), exits.USAGE, "BAD_DATA"),
        (FileNotFoundError(2, "No such file or directory", "job.json"), exits.USAGE, "FILE"),
        (NotFound("no job x", reason="JOB_NOT_FOUND"), exits.NOT_FOUND, "JOB_NOT_FOUND"),
    ],
)
def test_an_error_of_an_added_command_is_printed_like_our_own(
    error: Exception, status: int, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exits.report(error, as_json=False) == status
    assert capsys.readouterr().err.startswith("error: ")
    assert exits.report(error, as_json=True) == status
    assert json.loads(capsys.readouterr().err)["reason"] == reason


def test_a_defect_of_an_added_command_keeps_its_traceback() -> None:
    assert exits.report(ZeroDivisionError("x"), as_json=False) is None
