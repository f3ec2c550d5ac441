"""The two ways a run can end without a verdict."""


class UsageError(Exception):
    """Bad input or a missing piece of the environment: one line (what, got, expected, next step), exit code 3."""


class Unsupported(Exception):
    """The engine or the model cannot be checked this way; the reason names the layer. Never shown as a pass."""
