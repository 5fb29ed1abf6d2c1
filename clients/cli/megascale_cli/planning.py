"""`megascale plan`: the needs of a job, and the planner's own commands (`plan search`, ...).

The formulas are in :mod:`megascale_planner`. This module reads the job and checks its files.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from megascale_cli.plugins import PLANNING, Forwarding, loaded_command, run_plugin

if TYPE_CHECKING:
    from megascale.v1 import job_pb2
    from megascale_job.config import JobConfig
    from megascale_job.problems import JobProblem

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
        command = loaded_command(name, PLANNING[name])
        return command, arguments if name == "plan_scale" else arguments[1:]

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Hand the line over, or parse it."""
        if args and args[0] in PLUGINS and not ctx.resilient_parsing:
            name = PLUGINS[args[0]]
            arguments = args if name == "plan_scale" else args[1:]
            program = ctx.command_path if name == "plan_scale" else f"{ctx.command_path} {args[0]}"
            run_plugin(name, PLANNING[name], arguments, program)
        return super().parse_args(ctx, args)


def planner_words(incomplete: str) -> list[str]:
    """The planner's commands that begin with it; if there is none, the shell completes a file."""
    return [word for word in PLUGINS if word.startswith(incomplete)]


def plan_job(
    spec: job_pb2.JobSpec, devices_per_node: int, device_memory_bytes: int
) -> dict[str, Any]:
    """The plan of a job as plain values, sizes in bytes.

    ``refused`` lists each problem with field and remedy; the other keys of a refused job are there
    only if they can be computed. ``missing_files`` lists those files that are not on this machine:
    they are refused at submit where the nodes see the same files as the driver.
    ``device_memory_bytes`` 0: the memory of a device is not checked.
    """
    # Imported here, so that other commands start without it.
    from megascale_job.problems import JobError
    from megascale_job.wire.spec import from_proto
    from megascale_planner.job_needs import job_needs

    problems: list[JobProblem] = []
    try:
        config = from_proto(spec)
    except JobError as error:
        problems = list(error.problems)
        if error.config is None:
            return {"name": spec.name, "refused": _plain(problems)}
        config = error.config
    needs = job_needs(config, problems, devices_per_node, device_memory_bytes)
    missing, wrong = _files(config) if not needs.refused else ([], [])
    refused = _plain(needs.refused + wrong)
    return {**needs.facts, "missing_files": _plain(missing), "refused": refused}


def _files(config: JobConfig) -> tuple[list[JobProblem], list[JobProblem]]:
    """Problems of the job's files: those missing on this machine, and those that contradict it."""
    from megascale_job.corpus_record import data_file_problems
    from megascale_job.named_files import missing_files

    missing, wrong = list(missing_files(config)), list(data_file_problems(config))
    # Without the tokenizer file nothing is compared with it.
    missing += [each for each in wrong if each.field == "trainer.data.tokenizer.path"]
    return missing, [each for each in wrong if each not in missing]


def _plain(problems: list[JobProblem]) -> list[dict[str, str]]:
    return [asdict(problem) for problem in problems]
