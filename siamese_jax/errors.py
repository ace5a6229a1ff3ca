"""The two ways a run ends badly on purpose, so that programs can answer with one line.

`InputError` is the user's to mend (exit code 2); `FaultError` is the machine's (exit code 1).
"""


class InputError(ValueError):
    """A wrong configuration, flag or file, a broken checkpoint too.

    The message is one line: what was wrong, both values, what to change.
    """


class FaultError(RuntimeError):
    """A fault of the machine or of the run (full disk, lost device, NaN loss), told in one line."""
