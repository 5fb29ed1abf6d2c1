"""Whether the storage of a job can be reached and written, for `megascale plan`."""

from __future__ import annotations

from megascale_checkpoint.storage import open_storage
from megascale_common.service.errors import RequestError

FIELD = "checkpoint.uri"


def storage_problem(uri: str) -> dict[str, str] | None:
    """What keeps this machine from using ``uri``: field, problem and remedy; None for nothing.

    A path is not looked at: the nodes may be other machines, and the check would make the folder.
    """
    if "://" not in uri or uri.startswith("file://"):
        return None
    try:
        open_storage(uri).check()
    except RequestError as error:
        field, description = error.fields[0] if error.fields else (FIELD, error.message)
        problem, _, remedy = description.partition("; ")
        where = problem if field == FIELD else f"{field}: {problem}"
        return {"field": FIELD, "problem": where, "remedy": remedy or "correct the URI"}
    except PermissionError as error:
        remedy = "give this machine and the nodes access, or leave the check out (--offline)"
        return {"field": FIELD, "problem": str(error), "remedy": remedy}
    except OSError as error:
        remedy = "try again where the nodes are, or leave the check out (--offline)"
        return {"field": FIELD, "problem": str(error), "remedy": remedy}
    return None
