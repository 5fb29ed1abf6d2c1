"""Commands that installed packages add through the entry-point group ``megascale.commands``.

Nothing is imported before such a command is called: listing commands reads package metadata only,
and the CLI itself needs no service and no torch. The error of a command that cannot be loaded gives
the package to install. How to add one: docs/how-to/add-a-cli-command.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn, Self

import typer
import typer.core
import typer.main
from rich.markup import escape

from megascale_cli.exits import RETRY_FOR_S, UsageError, hint_at_folder, report
from megascale_cli.options import FIRST_STEPS, HELP_OPTIONS, JSON_OPTION
from megascale_client import (
    AsyncClient,
    FieldProblem,
    InvalidRequest,
    MegascaleError,
    NotPossible,
)

GROUP = "megascale.commands"


@dataclass(frozen=True, slots=True)
class Plugin:
    """A command that an installed package adds.

    Attributes:
        summary: its line in ``megascale --help``.
        target: its entry point, used where the package runs from its sources, without metadata.
        extra: the extra of megascale that installs what it needs; empty for the base install.
    """

    summary: str
    target: str = ""
    extra: str = ""


KNOWN = {
    "up": Plugin(
        "Start a whole cluster on this machine: etcd, driver, nodes.",
        "megascale_driver.commands.up:app",
    ),
    "node": Plugin(
        "Start a node of a running cluster again, or one more; stop it.",
        "megascale_driver.commands.node:app",
    ),
    "certs": Plugin(
        "Make a private certificate authority, and certificates for drivers, nodes and people.",
        "megascale_driver.commands.certs:app",
    ),
    "dashboard": Plugin(
        "Serve pages on the cluster for a browser; they only read.",
        "megascale_dashboard.command:app",
        "dashboard",
    ),
    "code": Plugin(
        "Put a job's own code on storage, from where every node fetches it.",
        "megascale_checkpoint.commands.code:app",
        "checkpoint",
    ),
    "data": Plugin(
        "Tokenise your own text, and inspect tokenised data.",
        "megascale_trainer.commands.data:app",
        "executor",
    ),
    "generate": Plugin(
        "Print a sample of text from a job's newest checkpoint.",
        "megascale_trainer.commands.generate:app",
        "executor",
    ),
    "pipeline": Plugin(
        "Draw a pipeline schedule and its bubble.", "megascale_trainer.commands.pipeline:app"
    ),
    "net": Plugin(
        "Settings of NCCL and network cards for a cluster, with reasons; compare them with a node.",
        "megascale_driver.commands.net:app",
    ),
    "slurm": Plugin(
        "Train inside an allocation of SLURM, with spares, and go on in the next one.",
        "megascale_driver.commands.slurm:app",
    ),
    "platform": Plugin(
        "List the nodes of SLURM or of another platform; drain there what the driver evicts.",
        "megascale_driver.commands.platform:app",
    ),
    "spans": Plugin(
        "Read the spans of a run by hand: who is slow, why the MFU fell, one trace of all ranks.",
        "megascale_driver.commands.spans:app",
        "observability",
    ),
    "sim": Plugin(
        "Simulate routing and congestion in the network of a cluster that you do not have.",
        "megascale_cli.sim:app",
        "plan",
    ),
}
CHECKPOINT = Plugin("", "megascale_checkpoint.commands.app:app", "checkpoint")
# Commands of that one plug-in, by name.
ON_STORAGE = {
    "show": "Show one checkpoint: its layout, its files, and whether it stays.",
    "verify": "Check every byte of checkpoints on storage.",
    "gc": "Remove checkpoints that no rule keeps, and files that belong to none.",
    "pin": "Keep a checkpoint whatever the job's rules are.",
    "unpin": "Let the job's rules hold for a pinned checkpoint again.",
    "repair": "Repair a commit log of which a record is damaged or missing.",
    "export": "Write a checkpoint for Hugging Face or torch.distributed.checkpoint.",
    "import": "Make a Hugging Face model a checkpoint that a job starts from.",
}
# The commands behind the first word of `plan`.
PLANNING = {
    "plan_scale": Plugin("", "megascale_cli.plan_scale:app", "plan"),
    "plan_calibrate": Plugin("", "megascale_trainer.commands.calibrate:app", "executor"),
}

_OWN = "megascale_cli."  # commands of this package need no entry point
_OWN_COMPLETION = ("install_completion", "show_completion")
# The added command gets the rest of the command line unparsed, --help included.
_FORWARD = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}


class Forwarding(typer.core.TyperCommand):
    """A command that hands its line over to another package, which is loaded only then."""

    def behind(self, arguments: list[str]) -> tuple[Any, list[str]]:
        """The command of the other package, and what is left for it of ``arguments``.

        Raises:
            InvalidRequest: it cannot be loaded.
        """
        raise NotImplementedError

    @classmethod
    def to(cls, behind: Callable[[list[str]], tuple[Any, list[str]]]) -> type[Self]:
        """The class of a command in front of another."""
        return type(cls.__name__, (cls,), {"behind": staticmethod(behind)})


class Completing(typer.core.TyperGroup):
    """A group in which completion reaches the commands of other packages."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the arguments name; for completion, the one behind a Forwarding."""
        name, command, rest = super().resolve_command(ctx, args)
        if ctx.resilient_parsing and isinstance(command, Forwarding):
            with contextlib.suppress(InvalidRequest):  # TAB explains nothing
                command, rest = command.behind(rest)
        return name, command, rest


def plugin_builders() -> dict[str, Callable[[], Any]]:
    """What puts the commands of other packages together, by name, in the order of the help."""
    found = {entry.name: entry for entry in metadata.entry_points(group=GROUP)}
    further = sorted(found.keys() - {*KNOWN, *PLANNING, "checkpoint"})
    added = KNOWN | {name: Plugin(_summary(found[name])) for name in further}
    return {name: partial(_forwarding, name, plugin) for name, plugin in added.items()}


def _summary(entry: metadata.EntryPoint) -> str:
    """The line of an added command: what its package says of itself, which imports nothing."""
    if entry.dist is None:
        return "Added by an installed package."
    known = entry.dist.metadata
    said = known["Summary"].strip() if "Summary" in known else ""
    return escape(said or f"Added by the package {entry.dist.name}.")


def add_storage_commands(checkpoint: typer.Typer) -> None:
    """Add the commands on storage to ``checkpoint``."""
    for name, summary in ON_STORAGE.items():
        known = replace(CHECKPOINT, summary=summary)
        function, settings = _forward_to(name, known, "checkpoint")
        checkpoint.command(name, **settings)(function)


def single(function: Callable[..., Any], name: str, **settings: Any) -> Any:
    """A command without the tree around it; ``settings`` are those of :meth:`typer.Typer.command`.

    Returns:
        What click runs.
    """
    alone = typer.Typer(rich_markup_mode="rich", add_completion=False)
    alone.command(name, **settings)(function)
    return readable(typer.main.get_command(alone))


def readable(command: Any) -> Any:
    """The command with a help that is whole on 80 columns, and so those below it.

    Typer keeps the line breaks of a docstring and adds its own, and gives the negative names of
    switches a column, so that long names of options are cut.
    """
    command.help = "\n\n".join(map(_flowing, inspect.cleandoc(command.help or "").split("\n\n")))
    print_help = command.format_help

    def format_help(*arguments: Any) -> None:
        with _one_column(command.params):
            print_help(*arguments)

    command.format_help = format_help
    for one in getattr(command, "commands", {}).values():
        readable(one)
    return command


def _flowing(paragraph: str) -> str:
    lines = paragraph.split("\n")
    kept = paragraph.startswith("\b") or any(line.startswith((" ", "- ")) for line in lines)
    return paragraph if kept else " ".join(lines)


@contextlib.contextmanager
def _one_column(parameters: list[Any]) -> Iterator[None]:
    """Both names of a switch are shown as one, `--[no-]dashboard`."""
    switches = [(one, one.opts, one.secondary_opts) for one in parameters if one.secondary_opts]
    for one, positive, negative in switches:
        plain = positive[0].removeprefix("--")
        both = [f"--[no-]{plain}"] if negative == [f"--no-{plain}"] else [*positive, *negative]
        one.opts = both
        one.secondary_opts = []
    try:
        yield
    finally:
        for one, positive, negative in switches:
            one.opts = positive
            one.secondary_opts = negative


def _forwarding(name: str, known: Plugin) -> Any:
    function, settings = _forward_to(name, known)
    panel = FIRST_STEPS if name in KNOWN else None
    return single(function, name, rich_help_panel=panel, **settings)


def loaded_command(name: str, known: Plugin) -> Any:
    """What click runs for a command of another package.

    Completion is the whole program's: a script that such a command wrote for itself would replace
    the one of `megascale`, so the options for it are taken out.

    Raises:
        InvalidRequest: it cannot be loaded; the message has the package to install.
    """
    app = _load(name, known)
    command = typer.main.get_command(app) if isinstance(app, typer.Typer) else app
    command.params = [one for one in command.params if one.name not in _OWN_COMPLETION]
    command.context_settings.setdefault("help_option_names", HELP_OPTIONS)
    return readable(command)


def _forward_to(
    name: str, known: Plugin, plugin: str = ""
) -> tuple[Callable[..., None], dict[str, Any]]:
    """A command that hands its line over to a plug-in, and its settings."""

    def forward(context: typer.Context) -> None:
        arguments = list(context.args) if not plugin else [name, *context.args]
        path = context.command_path if not plugin else context.command_path.rsplit(" ", 1)[0]
        run_plugin(plugin or name, known, arguments, path)

    def behind(arguments: list[str]) -> tuple[Any, list[str]]:
        command = loaded_command(plugin or name, known)
        return (command.commands[name] if plugin else command), arguments

    help_text = (
        f"{known.summary} [dim](megascale\\[{known.extra}])[/dim]" if known.extra else known.summary
    )
    return forward, {
        "cls": Forwarding.to(behind),
        "help": help_text,
        "context_settings": _FORWARD,
        "add_help_option": False,
    }


def run_plugin(name: str, known: Plugin, arguments: list[str], program: str) -> NoReturn:
    """Load the command ``name``, run it with ``arguments``, and exit with its status."""
    command = loaded_command(name, known)
    try:
        if isinstance(command, typer.core.TyperCommand | typer.core.TyperGroup):
            # So an error of usage reaches the root of the commands, as one of our own does.
            found = {"checkpoint_uri": checkpoint_uri}
            with command.make_context(program, arguments, obj=found) as context:
                command.invoke(context)
        else:
            command(args=arguments, prog_name=program)
    except (typer.Exit, typer.Abort, UsageError):
        raise
    except Exception as error:
        status = report(error, as_json=JSON_OPTION in arguments)
        if status is None:
            raise
        raise SystemExit(status) from None
    raise SystemExit(0)


def checkpoint_uri(name: str, cluster: Path | None) -> str:
    """Where a job's checkpoints are, for commands on storage that are given a job's name.

    Raises:
        MegascaleError: no cluster, no such job, or it has none.
    """

    async def ask() -> str:
        async with AsyncClient.from_run_folder(cluster, retry_for_s=RETRY_FOR_S) as client:
            return (await client.get(name)).spec.checkpoint.uri

    try:
        uri = asyncio.run(ask())
    except MegascaleError as error:
        hint_at_folder(error, name)
        raise
    if not uri:
        raise NotPossible(f"job {name} has no checkpoints: its checkpoint.uri is empty")
    return uri


def _load(name: str, known: Plugin) -> Any:
    entry = None
    if not known.target.startswith(_OWN):
        entry = next(iter(metadata.entry_points(group=GROUP, name=name)), None)
    if entry is None and known.target:
        entry = metadata.EntryPoint(name, known.target, GROUP)
    if entry is None:
        absent(name, known, "its package")
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        absent(name, known, getattr(error, "name", None) or str(error))


def absent(name: str, known: Plugin, cause: str) -> NoReturn:
    """Refuse a command whose package is not installed here, with the package to install."""
    package = f"megascale[{known.extra}]" if known.extra else "megascale"
    remedy = f"pip install '{package}'"
    sentence = f"the command {name!r} needs what is not installed here ({cause}); {remedy}"
    raise InvalidRequest(
        sentence, problems=[FieldProblem("", sentence, remedy)], reason="NOT_INSTALLED"
    )
