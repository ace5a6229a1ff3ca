"""The two ways a run ends badly on purpose, so that programs can answer with one line.

`InputError` is the user's to mend (exit code 2); `FaultError` is the machine's (exit code 1).
"""


class InputError(ValueError):
    """A wrong configuration, file or flag. The message is one line: what, both values, what to change."""


class FaultError(RuntimeError):
    """A fault of the machine or of the run (full disk, broken file, NaN loss), told in one line."""
