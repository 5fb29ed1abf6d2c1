"""Commands about a job file, without a cluster: init writes one, plan computes what it needs.

The formulas are :mod:`megascale_planner`'s, the fields :mod:`megascale_job`'s.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from rich.markup import escape

from megascale_cli.exits import USAGE, fail
from megascale_cli.options import Json
from megascale_cli.output import console, print_json, size_text
from megascale_cli.planning import plan_job, planner_words
from megascale_client import InvalidJob, InvalidRequest, load_job
from megascale_job.visible import counted

DEFAULT_DEVICES_PER_NODE = 8
_UNITS = ((1e12, "trillion"), (1e9, "billion"), (1e6, "million"))


def init(
    model: Annotated[
        Literal[
            "tiny",
            "tiny-experts",
            "llama3-1b",
            "llama3-8b",
            "llama3-70b",
            "qwen3-8b",
            "qwen3-30b-a3b",
            "mixtral-8x7b",
            "gpt-1b",
            "gpt-7b",
            "gpt-13b",
            "gpt-30b",
            "gpt-175b",
        ],
        typer.Option(help="tiny is one rank on any CPU, gpt-175b is the MegaScale paper's."),
    ] = "tiny",
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks to start on; it changes the number of data-parallel replicas."
        ),
    ] = None,
    from_hf: Annotated[
        Path | None,
        typer.Option(
            "--from-hf",
            metavar="FOLDER",
            help="Start from this Hugging Face model; its weights are imported next to the file.",
        ),
    ] = None,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="FILE", help="File to write; - is stdout.")
    ] = Path("job.yaml"),
    name: Annotated[str, typer.Option(help="Name of the job; default: that of the file.")] = "",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the file.")] = False,
    schema: Annotated[
        bool,
        typer.Option("--schema", help="Print the JSON Schema of job files, for editors, instead."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Write a job file with every field, its meaning and its default.

    Example: [bold]megascale init --model llama3-8b --output job.yaml[/bold]
    """
    # Imported here: the job tree would be a tenth of the start of other commands.
    from megascale_cli.job_template import job_template
    from megascale_job.wire.schema import job_schema

    if schema:
        print(json.dumps(job_schema(), indent=2))
        return
    name = name or _name(output, model)
    try:
        imported = None
        if from_hf is not None:
            _check_free(output, overwrite)
            imported = _import(from_hf, output)
        text = job_template(model, name, imported, ranks)
    except (ValueError, InvalidRequest) as error:
        raise fail(InvalidRequest(str(error)), as_json) from None
    if str(output) == "-":
        print(text, end="")
        return
    try:
        with output.open("w" if overwrite else "x") as file:
            file.write(text)
    except FileExistsError:
        remedy = "add --overwrite to replace it, or give another --output"
        raise fail(InvalidRequest(f"{output} exists already; {remedy}"), as_json) from None
    except OSError as error:
        raise fail(
            InvalidRequest(f"{output} cannot be written: {error.strerror}"), as_json
        ) from None
    if as_json:
        print_json({"file": str(output), "name": name, "model": model})
    else:
        console.print(
            f"{output} is written; next: megascale plan {output}", markup=False, soft_wrap=True
        )


def _check_free(output: Path, overwrite: bool) -> None:
    """Check the output before an import, which takes minutes."""
    if str(output) == "-":
        raise InvalidRequest("--from-hf imports next to the file: give --output FILE, not -")
    if output.exists() and not overwrite:
        remedy = "add --overwrite to replace it, or give another --output"
        raise InvalidRequest(f"{output} exists already; {remedy}")


def _import(folder: Path, output: Path) -> dict[str, Any]:
    """Import a model as a checkpoint next to ``output``; returns the facts for the job file."""
    uri = str(output.absolute().with_suffix("")) + "-imported"
    from megascale_cli.checkpoints import checkpoint_module  # loads bars of progress

    try:
        facts = checkpoint_module("export.commands").import_for_job(folder, uri)
    except InvalidRequest:
        raise
    except Exception as error:  # the checkpoint package's own errors, which name field and remedy
        raise InvalidRequest(str(error)) from error
    tokenizer = folder.absolute() / "tokenizer.json"
    return {**facts, "load_uri": uri, "tokenizer": str(tokenizer)}


def plan(
    file: Annotated[
        Path,
        typer.Argument(metavar="JOB.YAML", help="The job.", autocompletion=planner_words),
    ],
    devices_per_node: Annotated[
        int, typer.Option(min=1, help="Devices of one node.")
    ] = DEFAULT_DEVICES_PER_NODE,
    device_memory_gib: Annotated[
        float,
        typer.Option(
            min=0,
            help="Memory of one device in GiB; a job that needs more is refused; 0: not checked.",
        ),
    ] = 0,
    offline: Annotated[
        bool, typer.Option("--offline", help="Do not test whether checkpoint.uri can be used.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Show what a job needs, and what would be refused and why; no cluster is needed.

    Parameters, memory of a rank, FLOPs per token, batch sizes, nodes; whether checkpoint.uri can be
    reached and written from here, if it is on a server; whether its data is on this machine and
    was made with the job's tokenizer. The exit status is 2 if the job is refused.

    Without a job file: [bold]megascale plan search[/bold] ranks layouts of a model; [bold]plan
    spares[/bold], [bold]checkpoint[/bold] and [bold]goodput[/bold] say what failures cost;
    [bold]plan calibrate[/bold] measures this machine. Each has its own --help.

    Example: [bold]megascale plan job.yaml --devices-per-node 8 --device-memory-gib 80[/bold]
    """
    try:
        spec = load_job(file)
    except InvalidJob as error:
        raise fail(error, as_json) from None
    facts = plan_job(spec, devices_per_node, int(device_memory_gib * 2**30))
    uri = spec.checkpoint.uri
    if not offline and "://" in uri and not uri.startswith("file://"):
        _check_storage(uri, facts)
    if as_json:
        print_json(facts)
    else:
        console.print("\n".join(_lines(facts)), soft_wrap=True)
        for problem in facts.get("missing_files", ()):
            where = "(submit refuses it where the nodes see this machine's files)"
            text = f"[yellow]not here[/yellow]     {escape(_sentence(problem))} {where}"
            console.print(text, soft_wrap=True)
        for problem in facts["refused"]:
            text = f"[bold red]refused[/bold red] {escape(_sentence(problem))}"
            console.print(text, soft_wrap=True)
    if facts["refused"]:
        raise typer.Exit(USAGE)


def _sentence(problem: dict[str, str]) -> str:
    remedy = f"; {problem['remedy']}" if problem["remedy"] else ""
    return f"{problem['field']}: {problem['problem']}{remedy}"


def _check_storage(uri: str, facts: dict[str, Any]) -> None:
    """Add a problem of the storage, as seen from this machine, to the refusals."""
    if any(problem["field"] == "checkpoint.uri" for problem in facts["refused"]):
        return
    from megascale_cli.checkpoints import checkpoint_module  # loads bars of progress

    try:
        problem = checkpoint_module("storage").storage_problem(uri)
    except InvalidRequest as error:  # a machine without the checkpoint extra, such as a laptop
        print(f"checkpoint.uri is not tried: {error}", file=sys.stderr)
        return
    if problem is not None:
        facts["refused"].append(problem)


def _lines(facts: dict[str, Any]) -> list[str]:
    """The lines of a plan as rich markup; a line whose figures the plan lacks is left out."""
    lines = [f"[bold]{escape(facts['name'] or 'a job without a name')}[/bold]"]
    if "parameters" in facts:
        lines += [
            f"model        {_count(facts['parameters'])} parameters{_active(facts)} "
            f"({_count(facts['parameters_outside_layers'])} outside the layers)",
            f"compute      {facts['flops_per_token_causal']:.3e} FLOPs a token (full attention: "
            f"{facts['flops_per_token_full']:.3e}); "
            f"the run: {facts['flops_of_the_run_causal']:.3e} over "
            f"{_count(facts['tokens_of_the_run'])} tokens",
            f"batch        {counted(facts['tokens_per_step'], 'token')} a step; each replica runs "
            f"{counted(facts['micro_batches'], 'micro-batch')}; "
            f"pipeline bubble {facts['pipeline_bubble']:.1%}",
        ]
    if "experts" in facts:
        lines.append(f"{'experts':<12} {_experts(facts['experts'])}")
    if "predicted_step" in facts:
        lines.append(f"{'step':<12} {_predicted(facts['predicted_step'])}")
    if "balanced_stages" in facts:
        lines.append(f"{'balance':<12} {_balance(facts['balanced_stages'])}")
    if "faster_schedule" in facts:
        lines.append(f"{'schedule':<12} {_schedule(facts['faster_schedule'])}")
    for number, row in enumerate(facts.get("larger_batches", ())):
        lines.append(
            f"{'' if number else 'larger batch':<12} "
            f"{counted(row['global_batch_size'], 'sequence')} over the "
            f"same tokens: {counted(row['steps'], 'step')}, {row['warmup_steps']} of warm-up, "
            f"learning rate {row['learning_rate']:.3g}"
        )
    if "nodes" in facts:
        lines.append(
            f"devices      {counted(facts['world_size'], 'rank')}: "
            f"{counted(facts['nodes'], 'node')} of {counted(facts['devices_per_node'], 'device')}, "
            f"and {facts['spare_nodes']} spare "
            f"(the rule of recovery.spares: auto asks for {facts['spare_nodes_advised']})"
        )
    even = ", with even loads of experts" if "experts" in facts else ""
    for stage, need in enumerate(facts.get("memory_of_a_rank", ())):
        lines.append(f"{'' if stage else 'memory':<12} {_memory(stage, need)}{even}")
    if "checkpoint_bytes" in facts:
        staging = facts.get("staging_bytes_of_a_rank", 0)
        in_memory = (
            f"; up to {size_text(staging)} of host memory a rank for staging" if staging else ""
        )
        if staging:
            in_memory += f", {_replicas(facts.get('replica_bytes_of_a_rank', 0))}"
        lines.append(f"checkpoint   {size_text(facts['checkpoint_bytes'])}{in_memory}")
    if "checkpoint_interval" in facts:
        lines.append(f"{'':<12} {_interval(facts['checkpoint_interval'])}")
    return lines


def _active(facts: dict[str, Any]) -> str:
    """The number of active parameters; empty for a dense model, which uses all for each token."""
    if "active_parameters" not in facts:
        return ""
    return f", {_count(facts['active_parameters'])} active for a token"


def _experts(found: dict[str, int]) -> str:
    """The ranks that share the experts."""
    return (
        f"{found['count']} in each of {counted(found['layers'], 'layer')}, a token chooses "
        f"{found['top_k']}; ep {found['ep']}: {counted(found['of_a_rank'], 'expert')} of a layer "
        "on a rank"
    )


def _predicted(found: dict[str, Any]) -> str:
    """The predicted step, and the loads that it assumes."""
    return (
        f"{found['step_s']:.3g} s ({found['low_s']:.3g} to {found['high_s']:.3g} s) predicted on "
        f"{found['gpu'].upper()}s: {found['tokens_per_s_of_a_device']:,.0f} tokens/s a device, "
        f"MFU {found['mfu_causal']:.1%} of active parameters; the fullest rank of ep is taken to "
        f"have {found['imbalance']:.2f} times the mean rows"
    )


def _balance(found: dict[str, Any]) -> str:
    """A faster split, and why it is faster."""
    return (
        f"stage_layers: {escape(str(list(found['stage_layers'])))} is predicted "
        f"{100 * found['gain']:.1f} % faster: the head costs as much as "
        f"{found['head_layers']:.1f} layers; the largest rank needs "
        f"{size_text(found['largest_rank_bytes'])}"
    )


def _schedule(found: dict[str, Any]) -> str:
    """A faster pipeline schedule."""
    return (
        f"pipeline_schedule: {found['pipeline_schedule']} is predicted "
        f"{100 * found['gain']:.1f} % faster; the largest rank needs "
        f"{size_text(found['largest_rank_bytes'])}"
    )


def _interval(auto: dict[str, float]) -> str:
    """Intervals of `checkpoint.interval: auto` for three costs; the run measures the real cost."""
    return (
        f"auto: one failure in {auto['mtbf_s'] / 3600:,.3g} hours; a save that costs 0.1 s is "
        f"taken every {auto['interval_s_at_cost_0_1_s']:,.0f} s, one of 1 s every "
        f"{auto['interval_s_at_cost_1_s']:,.0f} s, one of 10 s every "
        f"{auto['interval_s_at_cost_10_s']:,.0f} s"
    )


def _replicas(size_bytes: int) -> str:
    """Memory for replicas, or the consequence of having none."""
    if size_bytes:
        return f"{size_text(size_bytes)} of it for replicas of another node"
    return "none of it for replicas: after the loss of a node the job restores from storage"


def _memory(stage: int, need: dict[str, int]) -> str:
    size = {name.removesuffix("_bytes"): size_text(value) for name, value in need.items()}
    peers = f", peer memory {size['peer_memory']}" if need["peer_memory_bytes"] else ""
    return (
        f"{size['total']} on a rank of pipeline stage {stage}: parameters {size['parameters']}, "
        f"gradients {size['gradients']}, optimizer {size['optimizer']}, "
        f"activations about {size['activations']}{peers}"
    )


def _count(number: int) -> str:
    for size, unit in _UNITS:
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number:,}"


def _name(output: Path, model: str) -> str:
    """A job's name made from the file's: a DNS-1123 label, or the model's if nothing is left."""
    stem = re.sub(r"[^a-z0-9]+", "-", output.stem.lower()).strip("-")[:63].strip("-")
    return stem or model
