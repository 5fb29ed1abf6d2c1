"""The command tree of `megascale`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
import typer.main
from typer.core import TyperCommand

from megascale_cli.exits import HELP
from megascale_cli.options import FIRST_STEPS, HELP_OPTIONS, JOBS, NODES, Json
from megascale_cli.output import console, print_json
from megascale_cli.plugins import (
    Completing,
    add_storage_commands,
    plugin_builders,
    readable,
    single,
)
from megascale_cli.usage import Commands

# The first questions of a newcomer. Lines after \b keep their breaks.
GUIDE = """Train language models over many devices, and keep training when nodes die.

\b
[bold]How do I ...[/bold]
  see a node die and be replaced  megascale demo
  start a cluster of 2 nodes      megascale up --nodes 2
  make a corpus of my own text    megascale data tokenize MY_TEXTS -o corpus
  write a job                     megascale init --output job.yaml
  see what it needs               megascale plan job.yaml
  submit it and watch it          megascale submit job.yaml --watch
  watch it later                  megascale watch NAME
  find out why it is not running  megascale explain NAME
  read the log of rank 5          megascale logs NAME --rank 5
  find a line in the logs of all  megascale logs NAME --all --grep PATTERN
  run it again with other values  megascale clone NAME --set PATH=VALUE
  see where a step's time goes    megascale profile NAME --steps 2
  get its newest checkpoint       megascale checkpoint fetch NAME --to FOLDER

Every command has --help with an example. Shell completion: megascale --install-completion"""


def version(as_json: Json = False) -> None:
    """Print the installed version.

    Example: [bold]megascale version[/bold]
    """
    if as_json:
        print_json({"version": _version()})
    else:
        console.print(f"megascale {_version()}")


def _version() -> str:
    try:
        return metadata.version("megascale")
    except metadata.PackageNotFoundError:  # runs from the source tree
        return "unknown"


def _print_version(wanted: bool) -> None:
    if wanted:
        version()
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", is_eager=True, callback=_print_version, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """The options that stand before a command."""


# The commands by their groups in the help, in order, each with its module; most of the time of a
# command is that of imports, so only its own module is imported.
_PANELS = {
    FIRST_STEPS: ("demo.command:demo", "jobfile:init", "jobfile:plan"),
    JOBS: (
        "jobs:submit",
        "jobs:jobs",
        "jobs:job",
        "jobs:watch",
        "logs:logs",
        "jobs:explain",
        "performance:heat",
        "performance:topology",
        "performance:why",
        "performance:timeline",
        "jobs:events",
        "performance:profile",
        "specs:clone",
        "jobs:suspend",
        "jobs:resume",
        "orders:restart",
        "orders:update",
        "jobs:cancel",
        "jobs:delete",
    ),
    NODES: (
        "nodes:nodes",
        "nodes:diagnose",
        "nodes:cordon",
        "nodes:uncordon",
        "orders:drain",
        "nodes:evict",
        "orders:policy",
        "orders:quota",
        "orders:reset_breaker",
        "nodes:cluster",
        "app:version",
    ),
}


def _function(where: str) -> Callable[..., None]:
    module, _, name = where.partition(":")
    found: Callable[..., None] = getattr(import_module(f"megascale_cli.{module}"), name)
    return found


def _own(where: str, name: str, panel: str) -> Any:
    kind = None
    if where == "jobfile:plan":
        from megascale_cli.planning import PlanCommand

        kind = PlanCommand
    return single(_function(where), name, cls=kind, rich_help_panel=panel)


def _outline(where: str, name: str, panel: str) -> Any:
    return TyperCommand(name, help=_function(where).__doc__, rich_help_panel=panel)


def build_app() -> typer.Typer:
    """All commands, including those of installed packages, which are loaded only when called."""
    own = {
        where.partition(":")[2].replace("_", "-"): (where, panel)
        for panel, commands in _PANELS.items()
        for where in commands
    }
    own["status"] = ("nodes:cluster", NODES)
    builders: dict[str, Callable[[], Any]] = {
        name: partial(_own, where, name, panel) for name, (where, panel) in own.items()
    }
    builders |= {"checkpoint": _checkpoint, "config": _config}
    # A package adds commands, and replaces none of these.
    builders |= {name: add for name, add in plugin_builders().items() if name not in builders}
    outlines = {name: partial(_outline, where, name, panel) for name, (where, panel) in own.items()}
    settings: dict[str, Any] = {
        "cls": Commands.of(builders, outlines),
        "help": GUIDE,
        "epilog": HELP,
        "no_args_is_help": True,
        "context_settings": {"help_option_names": HELP_OPTIONS},
    }
    app = typer.Typer(
        name="megascale",
        rich_markup_mode="rich",
        # A local variable may hold the cluster token.
        pretty_exceptions_show_locals=False,
        **settings,
    )
    app.callback(**settings)(_root)
    return app


def _checkpoint() -> Any:
    summary = "List, fetch, verify, export and import checkpoints."
    group = _group("checkpoint", summary)
    group.command("list")(_function("checkpoints:list_checkpoints"))
    group.command("fetch")(_function("checkpoints:fetch"))
    add_storage_commands(group)
    return _built(group)


def _config() -> Any:
    group = _group("config", "Show what a job runs with, or how two jobs differ.")
    group.command("show")(_function("specs:show"))
    group.command("diff")(_function("specs:diff"))
    return _built(group)


def _group(name: str, summary: str) -> typer.Typer:
    return typer.Typer(
        name=name,
        cls=Completing,
        help=summary,
        no_args_is_help=True,
        rich_markup_mode="rich",
        add_completion=False,
    )


def _built(group: typer.Typer) -> Any:
    command: Any = readable(typer.main.get_command(group))
    command.rich_help_panel = JOBS
    return command
