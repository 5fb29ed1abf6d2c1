"""`python -m megascale_dashboard`: as `megascale dashboard`, without the CLI."""

from __future__ import annotations

from megascale_dashboard.command import app

if __name__ == "__main__":
    app(prog_name="megascale dashboard")
