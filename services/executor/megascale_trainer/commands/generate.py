"""`megascale generate`: a sample of text from a job's newest checkpoint."""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Annotated

import typer

from megascale_job.problems import JobError
from megascale_job.visible import visible
from megascale_trainer.data.indexed import DataError

app = typer.Typer(help="A sample of text from a job's newest checkpoint.", add_completion=False)


class GenerateRefused(Exception):
    """The command cannot be carried out; ``code`` is the name of a gRPC code."""

    def __init__(self, message: str, reason: str, code: str = "INVALID_ARGUMENT") -> None:
        super().__init__(message)
        self.reason = reason
        self.code = code


@app.command()
def generate(
    job: Annotated[
        Path, typer.Argument(metavar="JOB.YAML", help="The job file that the model is trained by.")
    ],
    prompt: Annotated[str, typer.Option(help="Beginning of the text; empty: a new document.")] = "",
    tokens: Annotated[int, typer.Option(help="Add at most this many tokens.", min=1)] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 takes the most probable token; 1 draws as the model says.")
    ] = 0.8,
    seed: Annotated[int, typer.Option(help="Seed of the draws: it decides the text.")] = 0,
    device: Annotated[
        str, typer.Option(help="cpu, cuda, cuda:1; by default the first GPU, else the CPU.")
    ] = "",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object instead of the text.")
    ] = False,
) -> None:
    """Print a sample of text from the newest complete checkpoint of a job, on one device.

    The checkpoint can have any layout, and the job can be training: nothing is written.
    `megascale config show JOB > job.yaml` writes the file of a job on a cluster. A newer checkpoint
    that is damaged is passed over, with a line on stderr.

    The job's tokenizer (trainer.data.tokenizer) makes the text, which ends with the document. Each
    token computes the whole sequence again: the command shows what a model has learnt, it does not
    serve models. `megascale checkpoint export` writes the model for programs that do.

    Example: megascale generate job.yaml --prompt "The " --tokens 100
    """
    if not (math.isfinite(temperature) and temperature >= 0):
        raise typer.BadParameter("give 0 or more", param_hint="--temperature")
    # Imports torch: only a sample needs it, not the help.
    from megascale_job.job_file import load_config
    from megascale_trainer.launch.host_services import ServiceFailed
    from megascale_trainer.library import Trainer
    from megascale_trainer.save.restore import RestoreRefused

    try:
        _refuse_name(job)
        config = load_config(job)
        trainer = Trainer(config, device)
        step = trainer.restore()
        if not trainer.restored:
            raise GenerateRefused(
                f"job {config.name} has no complete checkpoint in "
                f"{config.checkpoint.uri or 'checkpoint.uri, which is empty'}: train it first",
                "NO_CHECKPOINT",
                "NOT_FOUND",
            )
        for problem in trainer.passed_over:
            print(f"a newer checkpoint is not used: {problem}", file=sys.stderr)
        text = trainer.generate(prompt, tokens, temperature, seed)
    except JobError as error:
        raise GenerateRefused(str(error), "JOB_REFUSED") from error
    except (ServiceFailed, RestoreRefused) as error:
        raise GenerateRefused(str(error), "UNREADABLE", "FAILED_PRECONDITION") from error
    except (DataError, ValueError, RuntimeError) as error:
        # This machine lacks something: a tokenizer, a device, memory.
        raise GenerateRefused(str(error), "NOT_POSSIBLE", "FAILED_PRECONDITION") from error
    if as_json:
        found = {"job": config.name, "step": step, "prompt": prompt, "text": text}
        print(json.dumps({**found, "passed_over": trainer.passed_over}))
    else:
        print(visible(text))


def _refuse_name(job: Path) -> None:
    """Raise GenerateRefused if ``job`` is the name of a job instead of a file."""
    if not job.exists() and not job.suffix:
        raise GenerateRefused(
            f"{job}: there is no such file; give the job's file (of a job on a cluster, "
            f"`megascale config show {job} > {job}.yaml` writes it)",
            "JOB_REFUSED",
        )


if __name__ == "__main__":
    app()
