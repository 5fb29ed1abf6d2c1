"""The command `megascale demo`: its options, and the outcome as an exit status."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.markup import escape

from megascale_cli.demo.plan import MAX_STEPS, PlanError, Sabotage, choose_plan
from megascale_cli.exits import FAILED, INTERRUPTED, fail
from megascale_cli.output import print_json
from megascale_client import MegascaleError
from megascale_job.visible import counted

Size = Annotated[int | None, typer.Option(min=1, help="Default: 2 (dp on GPUs: 1).")]


def demo(
    device: Annotated[
        Literal["auto", "cpu", "cuda"], typer.Option(help="auto: GPUs if there are enough.")
    ] = "auto",
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes, spare included; default: those needed.")
    ] = None,
    devices_per_node: Annotated[
        int | None, typer.Option(min=1, help="Default: 4 CPU ranks or 2 GPUs.")
    ] = None,
    tp: Size = None,
    pp: Size = None,
    dp: Size = None,
    steps: Annotated[int, typer.Option(max=MAX_STEPS, help="Optimizer steps.")] = 48,
    run_folder: Annotated[Path, typer.Option(help="Folder for everything that is written.")] = Path(
        "runs/demo"
    ),
    recovery_timeout_s: Annotated[
        float, typer.Option(min=1, help="How long there may be no progress after the kill.")
    ] = 180.0,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON on stdout, all else on stderr.")
    ] = False,
    show_hang: Annotated[
        bool, typer.Option("--show-hang", help="Another fault: one of four ranks hangs.")
    ] = False,
    show_straggler: Annotated[
        bool, typer.Option("--show-straggler", help="Another fault: one of four ranks is slow.")
    ] = False,
    sabotage: Annotated[Sabotage, typer.Option(hidden=True)] = "none",
) -> None:
    """See a training run lose a node and recover by itself.

    Starts a cluster on this machine, trains a small GPT on the sources of the Python standard
    library, kills one of the two active nodes after the second checkpoint, and waits until the
    spare has taken over and the job has finished; then trains the same job without interruption and
    compares every loss. The status is 0 only if all of it was observed.

    With --show-hang or --show-straggler another fault is shown, on four CPU ranks: one hangs, or
    is slowed down. The status is 0 only if the cluster has named it.

    Example: [bold]megascale demo --device cpu[/bold]
    """
    # What `megascale --help` does not need.
    from megascale_cli.demo.cluster import DemoFailed, run_command
    from megascale_cli.demo.fault import FaultDemo
    from megascale_cli.demo.node_loss import NodeLossDemo
    from megascale_cli.demo.recording import Demo

    if show_hang and show_straggler:
        raise typer.BadParameter("give --show-hang or --show-straggler, one at a time")
    echo = partial(Console(stderr=as_json, highlight=False).print, soft_wrap=True)
    sizes = {"nodes": nodes, "devices_per_node": devices_per_node, "tp": tp, "pp": pp, "dp": dp}
    shown: Demo
    try:
        if show_hang or show_straggler:
            fault: Literal["hang", "straggler"] = "hang" if show_hang else "straggler"
            without = sabotage != "none"
            shown = FaultDemo(fault, run_folder, echo, recovery_timeout_s, sabotage=without)
        else:
            gpus = int(run_command("up", "--dry-run", "--device", "cpu")["gpus_present"])
            plan = choose_plan(device, gpus, steps, sabotage, **sizes)
            each = f"{counted(plan.nodes, 'node')} of {plan.devices_per_node}"
            echo(f"device: {plan.device} ({gpus} GPUs here); {each}")
            shown = NodeLossDemo(plan, run_folder, echo, recovery_timeout_s)
        report = shown.run()
    except PlanError as error:
        raise typer.BadParameter(str(error)) from None
    except (DemoFailed, ProcessLookupError) as error:  # the latter: a process ended too early
        echo(f"[bold red]the demo failed[/bold red]: {escape(str(error))}")
        raise typer.Exit(FAILED) from None
    except MegascaleError as error:
        raise fail(error, as_json) from None
    except KeyboardInterrupt:
        echo("interrupted; everything that was started is stopped")
        raise typer.Exit(INTERRUPTED) from None
    if as_json:
        print_json(report)
    echo(_summary(report))


def _summary(report: dict[str, Any]) -> str:
    if "fault" in report:
        return (
            f"[bold green]the {report['fault']} was named[/bold green]: rank {report['rank']} on "
            f"node {report['node']}, {report['fault_to_named_s']} s after it began; "
            f"{report['wall_s']} s in all"
        )
    return (
        "[bold green]all of it was observed[/bold green]: "
        f"fault to detected {report['fault_to_detected_s']} s, "
        f"detected to restarted {report['detected_to_restarted_s']} s, "
        f"fault to first new step {report['fault_to_first_new_step_s']} s, "
        f"{counted(report['steps_lost'], 'step')} lost, {report['wall_s']} s in all"
    )
