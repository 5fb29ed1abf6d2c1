"""What tests ask of the process table."""

from pathlib import Path


def ended(pid: int) -> bool:
    """Whether the process runs no more; one that only waits to be reaped does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True
