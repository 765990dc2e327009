"""Runs the `blockfp` command as `python -m blockfp`, with the current interpreter."""

from .cli import main

if __name__ == "__main__":
    main()
