"""The two errors that people meet: something they gave us is wrong, or a rank is gone."""


class UserError(Exception):
    """What was given cannot work; the message is one line for a person, shown without a traceback (exit code 2)."""


class RankFailure(Exception):
    """A member of this generation is dead, or somebody has declared the generation over."""
