"""The one exception that means "the input is wrong, not the program"."""


class BadInput(ValueError):
    """Bad input, told in one sentence that names the offending value; the command line exits with code 2."""
