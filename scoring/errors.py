"""Errors of people, not of the program: the command prints them as one line and says that the input is at fault."""


class InputError(ValueError):
    """Options, rollouts or a model that cannot be used; the message is one line."""


class RolloutError(InputError):
    """A rollout file that cannot be used; the message names the file, the column and the row."""


class ModelError(InputError):
    """A model that cannot score the rollouts."""


class OptionError(InputError):
    """Options that do not go together, or with the rollouts."""
