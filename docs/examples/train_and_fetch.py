"""Train a job, watch it, fetch its newest checkpoint: python train_and_fetch.py job.yaml FOLDER."""

import sys

from megascale_client import Client, MegascaleError, load_job

try:
    job = load_job(sys.argv[1])
    with Client.from_run_folder() as client:  # $MEGASCALE_RUN_FOLDER, else ./runs/current
        client.submit(job)
        for update in client.watch(job.name):  # until the job ends, across restarts of the driver
            if update.HasField("step"):
                print(f"step {update.step.step}: loss {update.step.loss:.4f}")
            elif update.HasField("event"):
                print(f"{update.event.reason}: {update.event.message}")
        print(client.explain(job.name).explanation)
        copy = client.fetch_checkpoint(job.name, to=sys.argv[2])
        print(f"step {copy.step} is in {copy.folder}, {copy.verified} verified")
except MegascaleError as error:
    sys.exit(f"error: {error}")
