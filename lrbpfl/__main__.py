"""`python -m lrbpfl` is the command `lrbpfl`."""

from lrbpfl.cli.main import run

if __name__ == "__main__":
    run()
