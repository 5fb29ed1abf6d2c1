"""What the demos train on: the sources of Python's standard library, as bytes."""

from __future__ import annotations

import sysconfig
from pathlib import Path

from megascale_cli.demo.cluster import Echo, run_command
from megascale_cli.visible import counted

CORPUS_BYTES = 2 << 20


async def tokenise(folder: Path, echo: Echo) -> Path:
    """Write the corpus below ``folder``; returns its prefix. Raises DemoFailed."""
    prefix, stdlib = folder / "corpus" / "stdlib", sysconfig.get_path("stdlib")
    arguments = ["data", "tokenize", stdlib, "--output", str(prefix), "--tokenizer", "bytes"]
    corpus = await run_command(*arguments, "--glob", "*.py", "--max-bytes", str(CORPUS_BYTES))
    echo(
        f"corpus: {counted(corpus['documents'], 'document')}, "
        f"{counted(corpus['tokens'], 'token')} from {stdlib}"
    )
    return prefix
