"""The dashboard of a real cluster: `megascale up` starts it, pages show it, and it ends with it."""

from __future__ import annotations

import http.cookiejar
import json
import os
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urljoin

import pytest
from tests.harness.bad_jobs import good_job
from tests.harness.corpus import random_documents, write_corpus
from tests.harness.local_cluster import UpProcess
from tests.harness.waiting import CALL_TIMEOUT_S, until

from megascale_client import Client, parse_job

OPTIONS = ("--nodes", "2", "--devices-per-node", "1", "--device", "cpu", "--nodes-per-switch", "1")


class Browser:
    """Follows the link that `up` prints, and keeps its cookie."""

    def __init__(self, link: str) -> None:
        jar = urllib.request.HTTPCookieProcessor(http.cookiejar.CookieJar())
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), jar)
        self._base = link
        with self._opener.open(link, timeout=CALL_TIMEOUT_S) as answer:
            self.shown_at = answer.url

    def twin(self, path: str) -> dict[str, Any]:
        """The JSON of a page."""
        with self._opener.open(urljoin(self._base, path), timeout=CALL_TIMEOUT_S) as answer:
            found: dict[str, Any] = json.load(answer)
        return found


def _complete(browser: Browser, path: str) -> dict[str, Any]:
    """The page of a job that has succeeded, with all its steps; empty before that.

    The first look at it begins to read the steps' records, and waits for them half a second.
    """
    try:
        page = browser.twin(path)
    except urllib.error.HTTPError as missing:
        assert missing.code == 404, missing
        return {}
    whole = len(page["curves"]["step"]) == page["steps"]
    return page if page["phase"] == "succeeded" and whole else {}


def _timeline(browser: Browser, path: str, steps: int) -> dict[str, Any]:
    """The page of a timeline of so many steps; empty while their spans are on the way."""
    try:
        page = browser.twin(f"{path}?steps={steps}")
    except urllib.error.HTTPError as missing:
        assert missing.code == 409, missing
        return {}
    return page if len(page["steps"]) == steps else {}


def test_pages_of_a_real_cluster(tmp_path: Path) -> None:
    with UpProcess(tmp_path / "cluster", *OPTIONS, dashboard=True) as up:
        until(lambda: up.seen("dashboard_ready"), "the dashboard's link", up.processes)
        browser = Browser(up.seen("dashboard_ready")[0]["url"])
        assert "token" not in browser.shown_at

        fleet = browser.twin("/fleet.json")
        assert [each["name"] for each in fleet["switches"]] == ["s0", "s1"]
        # A node that stands still for seconds is a suspect for a while.
        until(lambda: browser.twin("/fleet.json")["states"] == {"idle": 2}, "two idle nodes")
        well = "All is well: no jobs run, on 2 nodes."
        until(lambda: browser.twin("/now.json")["sentence"] == well, well)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            browser.twin("/jobs/pages.json")
        with pytest.raises(urllib.error.HTTPError, match="401"):
            urllib.request.urlopen(urljoin(browser.shown_at, "/fleet.json"), timeout=CALL_TIMEOUT_S)

        with Client.from_run_folder(up.folder) as client:
            documents = random_documents(seed=3, count=40, longest=100)
            corpus = write_corpus(tmp_path / "corpus", documents)
            client.submit(parse_job(good_job("pages", corpus, steps=6)))
            assert client.wait("pages").phase.name == "SUCCEEDED"
        # The answer to the question above, that there is no such job, is kept for a second.
        job = until(lambda: _complete(browser, "/jobs/pages.json"), "the job's page")
        assert job["step"] == job["steps"] == 6
        assert [each["attempt"] for each in job["attempts"]] == [1]
        assert job["attempts"][0]["running_s"] and job["attempts"][0]["ended_s"]
        assert job["curves"]["step"] == [1, 2, 3, 4, 5, 6]
        assert job["events"][0]["reason"] and job["why"]["sentence"]
        assert browser.twin("/jobs/pages/ranks.json")["world"] >= 1

        heat = until(
            lambda: (each := browser.twin("/jobs/pages/heat.json"))["operations"] and each,
            "spans of the job",
        )
        assert "forward" in {each["operation"] for each in heat["operations"]}
        assert [each["name"] for each in heat["nodes"]] == ["n1"]

        # One rank's spans on one clock, from the driver's files to the page.
        lines = until(lambda: _timeline(browser, "/jobs/pages/timeline.json", 2), "two steps")
        assert [each["rank"] for each in lines["rows"]] == [0]
        assert lines["rows"][0]["node"] == "n1" and lines["rows"][0]["computes"] > 0
        assert len(lines["steps"]) == 2 and "forward" in lines["names"]
        with pytest.raises(urllib.error.HTTPError, match="400"):
            browser.twin("/jobs/pages/timeline.json?rank=7")
        assert browser.twin("/jobs/pages/slower.json")["decline"]["sentence"]

        # A node that is lost stands on the first page, with what one may do.
        up.kill_node("n2")
        lost = until(
            lambda: browser.twin("/now.json")["incidents"],
            "the lost node on the page",
            up.processes,
        )
        assert "n2" in lost[0]["title"] and lost[0]["may_do"]
        assert browser.twin("/nodes/n2.json")["state"] in ("suspect", "dead")

        # However `up` ends, nothing is left of the dashboard.
        os.kill(up.process.pid, signal.SIGKILL)
        up.process.wait()
        until(lambda: not up.processes(), "the end of all processes", up.processes)
