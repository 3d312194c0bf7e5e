"""Where the command `remat`, and `python -m remat`, begins."""

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command; Ctrl-C ends it without a traceback from its first moment on."""
    try:
        from remat.command import main as run  # noqa: PLC0415 - may be interrupted, too

        run()
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
