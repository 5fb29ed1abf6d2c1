"""`megascale` and `python -m megascale_cli`."""

from __future__ import annotations

from megascale_cli.app import build_app


def main() -> None:
    """Run the command line."""
    build_app()(prog_name="megascale")


if __name__ == "__main__":
    main()
