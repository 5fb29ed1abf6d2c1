"""The one error of the data path, which a worker gets when its tokens cannot be delivered."""


class DataError(RuntimeError):
    """Tokenised data is missing, damaged or does not fit the job, or its loader has ended.

    The message names the file or the field, and the remedy.
    """
