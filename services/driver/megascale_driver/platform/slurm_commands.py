"""Commands of SLURM: each is bounded in time, and has one error for all that goes wrong."""

from __future__ import annotations

import asyncio

from megascale_common.service.errors import UnavailableError

COMMAND_TIMEOUT_S = 30.0


async def submit(script: str) -> str:
    """Hand a batch script to SLURM; returns the number of its job.

    Raises:
        UnavailableError: `sbatch` is absent, refuses or does not answer.
    """
    return (await output("sbatch", "--parsable", text=script)).split(";")[0].strip()


async def requeue(job: str) -> None:
    """End the allocation ``job``, and have its script run again when there is room.

    Raises:
        UnavailableError: `scontrol` is absent, refuses or does not answer.
    """
    await output("scontrol", "requeue", job)


async def output(*command: str, text: str = "") -> str:
    """What a command prints; ``text`` is its input.

    Raises:
        UnavailableError: it is absent, fails, or does not answer in time.
    """
    program = command[0]
    try:
        process = await asyncio.create_subprocess_exec(
            *command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
    except FileNotFoundError:
        raise UnavailableError(f"{program} is not installed: run this on a host of SLURM") from None
    try:
        answer = await asyncio.wait_for(process.communicate(text.encode()), COMMAND_TIMEOUT_S)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise UnavailableError(f"{program}: no answer in {COMMAND_TIMEOUT_S:.0f} s") from None
    output, errors = (words.decode(errors="replace") for words in answer)
    if process.returncode:
        raise UnavailableError(f"{program} failed: {(errors or output).strip()[:500]}")
    return output
