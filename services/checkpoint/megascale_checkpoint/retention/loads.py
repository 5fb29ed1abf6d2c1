"""Keeps the checkpoint of another job while a job starts from it (checkpoint.load_uri).

The job that loads pins it in the other's log before it restores it, and takes the pin back after
its own first commit. Where it may only read there, nothing holds the checkpoint: the reading then
depends on nobody removing it meanwhile.
"""

from __future__ import annotations

from megascale_checkpoint.commit.commit_log import CommitLog, Record
from megascale_checkpoint.retention.retire import pin, unpin
from megascale_checkpoint.storage import join, open_storage
from megascale_common.service import logs
from megascale_common.service.errors import NotFoundError, NotReadyError, ServiceError
from megascale_job.restore import RestorePlan, RestoreSource

_log = logs.get("retention")


def hold(job: str, load_uri: str, plan: RestorePlan) -> None:
    """Pin what ``plan`` restores from ``load_uri``; nothing where it restores something else.

    Raises:
        NotReadyError: it was removed meanwhile; decide again.
    """
    if not load_uri or plan.source is not RestoreSource.STORAGE or plan.written_by_attempt:
        return
    log = CommitLog(open_storage(load_uri))
    try:
        log.refresh()
        found = [
            record.checkpoint
            for record in log.commits()
            if join(load_uri, record.values["manifest"]) == plan.manifest_uri
        ]
        if not found:
            raise NotFoundError(f"{plan.manifest_uri} is retired")
        if found[0] not in log.state.pins:
            pin(log, found[0], _reason(job))
    except NotFoundError as error:
        raise NotReadyError(
            f"checkpoint.load_uri: {plan.manifest_uri} was removed while it was chosen: try again"
        ) from error
    except (ServiceError, OSError) as error:
        _log.warning("the loaded checkpoint is not pinned", uri=load_uri, error=str(error))


def release(opened: Record) -> None:
    """Take the pin back that :func:`hold` has set for the job whose OPEN this is."""
    load_uri = opened.values.get("load_uri", "")
    if not load_uri:
        return
    try:
        other = CommitLog(open_storage(load_uri))
        other.refresh()
        reason = _reason(opened.values["job"])
        for checkpoint, found in other.pins().items():
            if found == reason:
                unpin(other, checkpoint, reason)
    except (ServiceError, OSError) as error:
        _log.warning("the loaded checkpoint stays pinned", uri=load_uri, error=str(error))


def _reason(job: str) -> str:
    return f"job {job} starts from it"
