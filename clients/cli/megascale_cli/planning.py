"""`megascale plan WORD ...`: the planner's own commands, which stand behind `plan JOB.YAML`."""

from __future__ import annotations

from typing import Any

from megascale_cli.plugins import FUNCTIONS, Forwarding, loaded_command, run_plugin

# The commands by their first word; a job file of such a name is ./search.
PLUGINS = {
    **dict.fromkeys(("search", "spares", "checkpoint", "goodput"), "plan_scale"),
    "calibrate": "plan_calibrate",
}


class PlanCommand(Forwarding):
    """`plan` of a job file, unless its first word is one of the planner's commands."""

    def behind(self, arguments: list[str]) -> tuple[Any, list[str]]:
        """The planner's command of the first word; `plan` itself, for any other."""
        if not arguments or arguments[0] not in PLUGINS:
            return self, arguments
        name = PLUGINS[arguments[0]]
        command = loaded_command(name, FUNCTIONS[name])
        return command, arguments if name == "plan_scale" else arguments[1:]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand the line over, or parse it."""
        if args and args[0] in PLUGINS and not ctx.resilient_parsing:
            name = PLUGINS[args[0]]
            arguments = args if name == "plan_scale" else args[1:]
            program = ctx.command_path if name == "plan_scale" else f"{ctx.command_path} {args[0]}"
            run_plugin(name, FUNCTIONS[name], arguments, program)
        return super().parse_args(ctx, args)


def planner_words(incomplete: str) -> list[str]:
    """The planner's commands that begin so; where there is none, the shell completes a file."""
    return [word for word in PLUGINS if word.startswith(incomplete)]
