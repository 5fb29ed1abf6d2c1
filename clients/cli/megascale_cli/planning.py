"""`megascale plan WORD ...`: the planner's own commands, which stand behind `plan JOB.YAML`."""

from __future__ import annotations

from typing import Any

import typer.core

from megascale_cli.plugins import FUNCTIONS, run_plugin

# The commands by their first word; a job file of such a name is ./search.
PLUGINS = {
    **dict.fromkeys(("search", "spares", "checkpoint", "goodput"), "plan_scale"),
    "calibrate": "plan_calibrate",
}


class PlanCommand(typer.core.TyperCommand):
    """`plan` of a job file, unless its first word is one of the planner's commands."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand the line over, or parse it."""
        if args and args[0] in PLUGINS and not ctx.resilient_parsing:
            name = PLUGINS[args[0]]
            arguments = args if name == "plan_scale" else args[1:]
            program = ctx.command_path if name == "plan_scale" else f"{ctx.command_path} {args[0]}"
            run_plugin(name, FUNCTIONS[name], arguments, program)
        return super().parse_args(ctx, args)
