"""The root of the command line, and how it ends: wrong usage as an error, Ctrl-C as a status."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any, Self

import typer
import typer.core

from megascale_cli.exits import INTERRUPTED, UsageError, fail, print_error
from megascale_cli.options import JSON_OPTION
from megascale_cli.plugins import Completing
from megascale_client import FieldProblem, InvalidRequest, MegascaleError

_OF_PYDANTIC = [
    (re.compile(pattern), plain)
    for pattern, plain in (
        (r"Value error, ", ""),
        (r"Input should be a valid integer\b.*", "give a whole number"),
        (r"Input should be a valid number\b.*", "give a number"),
        (r"Input should be a valid boolean\b.*", "give true or false"),
        (r"Input should be greater than or equal to (\S+)", r"give \1 or more"),
        (r"Input should be less than or equal to (\S+)", r"give \1 or less"),
        (r"Input should be ", "give "),
    )
]


class _Parts(MutableMapping[str, Any]):
    """Commands by name, each of which is put together when it is first asked for."""

    def __init__(self, builders: Mapping[str, Callable[[], Any]], built: Mapping[str, Any]) -> None:
        self._builders = builders
        self._built = dict(built)

    def __getitem__(self, name: str) -> Any:
        if name not in self._built:
            self._built[name] = self._builders[name]()
        return self._built[name]

    def __setitem__(self, name: str, command: Any) -> None:
        self._built[name] = command

    def __delitem__(self, name: str) -> None:
        raise NotImplementedError("commands stay")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys((*self._builders, *self._built)))

    def __len__(self) -> int:
        return len(self._builders.keys() | self._built.keys())


class Commands(Completing):
    """The root of the commands: every error of usage below it is reported here.

    To put all commands together takes longer than most of them run, so each is put together when
    it is needed. The help of the root needs no more of one than its first line.

    Attributes:
        builders: what puts a command together, by its name, in the order of the help.
        outlines: what makes a command that has a name, a help text and a panel alone.
    """

    builders: Mapping[str, Callable[[], Any]] = {}
    outlines: Mapping[str, Callable[[], Any]] = {}
    _as_json = False
    _in_help = False

    def __init__(self, *arguments: Any, **settings: Any) -> None:
        super().__init__(*arguments, **settings)
        self.commands = _Parts(self.builders, self.commands)

    @classmethod
    def of(
        cls, builders: Mapping[str, Callable[[], Any]], outlines: Mapping[str, Callable[[], Any]]
    ) -> type[Self]:
        """The class of a root with these commands."""
        return type(cls.__name__, (cls,), {"builders": builders, "outlines": outlines})

    def list_commands(self, ctx: Any) -> list[str]:
        """Names of all commands, in the order of the help."""
        return [*self.commands]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """A command by its name; in the help its outline."""
        if self._in_help and cmd_name in self.outlines:
            return self.outlines[cmd_name]()
        return super().get_command(ctx, cmd_name)

    def format_help(self, *arguments: Any) -> None:
        """Print the help of the root."""
        self._in_help = True
        try:
            super().format_help(*arguments)
        finally:
            self._in_help = False

    def make_context(self, info_name: str | None, args: list[str], *more: Any, **extra: Any) -> Any:
        """Parse the root's own options."""
        self._as_json = JSON_OPTION in args
        with _ends(self._as_json):
            return super().make_context(info_name, args, *more, **extra)

    def invoke(self, ctx: Any) -> Any:
        """Parse and run a command."""
        with _ends(self._as_json):
            return super().invoke(ctx)


@contextmanager
def _ends(as_json: bool) -> Iterator[None]:
    try:
        yield
    except UsageError as error:
        # Without a command typer prints the help, which is its message.
        if type(error).__name__ == "NoArgsIsHelpError":
            raise
        raise typer.Exit(_report(error, as_json)) from None
    except MegascaleError as error:
        raise fail(error, as_json) from None
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None


def _plainly(sentence: str) -> str:
    """What typer says of a value, without the words of the library that it checks values with."""
    for pattern, plain in _OF_PYDANTIC:
        sentence = pattern.sub(plain, sentence)
    return sentence


def _report(error: Any, as_json: bool) -> int:
    """Print an error of usage with the command to read about it; returns the exit status."""
    context = error.ctx
    program = context.command_path if context is not None else "megascale"
    remedy = f"see `{program} --help`"
    sentence = _plainly(error.format_message()).rstrip(".")
    parameter = getattr(error, "param", None)
    field = (
        getattr(error, "option_name", None)
        or getattr(error, "param_hint", None)
        or (parameter.opts[0] if parameter is not None and parameter.opts else "")
    )
    usage = InvalidRequest(
        f"{sentence}; {remedy}",
        problems=[FieldProblem(str(field), sentence, remedy)],
        reason="USAGE",
    )
    print_error(usage, as_json)
    return int(error.exit_code)
