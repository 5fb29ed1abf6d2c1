"""The one error of the data path: what a worker sees when its tokens cannot be delivered."""


class DataError(RuntimeError):
    """Tokenised data is missing, damaged, does not fit the job, or its loader is gone. The message
    names the file or the field, and the remedy.
    """
