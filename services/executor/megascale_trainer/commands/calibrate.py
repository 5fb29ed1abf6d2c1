"""`megascale plan calibrate`: measure this machine's rates for the planner.

To measure links as well, run it on several ranks: ``torchrun --nproc-per-node 2 -m
megascale_trainer.commands.calibrate``. Rank 0 writes the file.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

USER_MISTAKE_EXIT_CODE = 2

app = typer.Typer(add_completion=False)


@app.command()
def calibrate(
    output: Annotated[Path, typer.Option(help="File to write.")] = Path("calibration.json"),
    device: Annotated[str, typer.Option(help="cuda or cpu; auto: cuda if there is a GPU.")] = (
        "auto"
    ),
    budget_s: Annotated[
        float, typer.Option(min=0.01, max=600, help="About how many seconds to measure.")
    ] = 60.0,
    as_json: Annotated[bool, typer.Option("--json", help="Also print the file's object.")] = False,
) -> None:
    """Measure products, attention, copies and, on several ranks, a collective.

    Example: [bold]megascale plan calibrate --output h200.json[/bold]
    """
    from megascale_trainer.rates import measure, ranks_of_environment  # torch: only when it runs

    try:
        with ranks_of_environment(device) as (chosen, rank):
            found = measure(chosen, budget_s)
            if rank == 0:
                output.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    except (ValueError, OSError) as error:
        print(f"megascale plan calibrate: {error}", file=sys.stderr)
        raise typer.Exit(USER_MISTAKE_EXIT_CODE) from None
    if rank:
        return
    next_command = f"megascale plan search --calibration {output}"
    print(f"{output} is written; next: {next_command}", file=sys.stderr)
    if as_json:
        print(json.dumps(found))


if __name__ == "__main__":
    app()
