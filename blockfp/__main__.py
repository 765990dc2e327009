"""`python -m blockfp`: the `blockfp` command, of the Python that runs it."""

from .cli import main

if __name__ == "__main__":
    main()
