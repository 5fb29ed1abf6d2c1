"""Errors of the data path, which a worker gets when its tokens cannot be delivered."""


class DataError(RuntimeError):
    """Tokenised data cannot be delivered: its loader has ended, is slow, or refuses the request.

    The message names the file or the field, and the remedy.
    """


class CorpusError(DataError):
    """Tokenised data is missing, damaged or does not fit the job, now as at a next attempt."""
