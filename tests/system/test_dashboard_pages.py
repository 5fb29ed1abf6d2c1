"""The dashboard in a real Chromium, over 1,536 recorded nodes: quick, quiet, accessible.

With MEGASCALE_SCREENSHOTS set, the pictures of docs/images are written anew.
"""

from __future__ import annotations

import os
import shutil
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import uvicorn
from tests.harness import processor_time
from tests.harness.recorded_fleet import HOT, JOB, LOST, SILENT, STEP, RecordedCluster, Situation

from megascale_dashboard.access import Access
from megascale_dashboard.cluster_reader import ClusterReader
from megascale_dashboard.live import LiveStreams
from megascale_dashboard.server import build

pytestmark = pytest.mark.browser
playwright = pytest.importorskip("playwright.sync_api")

REPOSITORY = Path(__file__).resolve().parents[2]
AXE = REPOSITORY / "tests/data/dashboard/axe-core-4.10.3.min.js"
IMAGES = REPOSITORY / "docs/images"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)
LOADED_S = 1.0
SCRIPT_BYTES = 150_000  # of all pages together
PAGES = (
    *("/", "/fleet", "/jobs", f"/jobs/{JOB}", f"/jobs/{JOB}/ranks?rank=3336"),
    *(f"/jobs/{JOB}/heat", f"/nodes/n{LOST}", "/nodes/n903", "/events"),
    *(f"/jobs/{JOB}/timeline?rank=2489", f"/jobs/{JOB}/timeline?group=dp", f"/jobs/{JOB}/slower"),
)
SHOTS: dict[Situation, dict[str, tuple[str, str]]] = {
    "healthy": {
        "now": ("/", "light"),
        "fleet": ("/fleet", "light"),
        "job": (f"/jobs/{JOB}", "dark"),
    },
    "node lost": {
        "now": ("/", "light"),
        "fleet": ("/fleet", "light"),
        "node": (f"/nodes/n{LOST}", "light"),
    },
    "hang": {"hang": (f"/jobs/{JOB}/ranks?rank=5003", "light")},
    "slow host": {
        "heat": (f"/jobs/{JOB}/heat?operation=forward", "light"),
        "timeline": (f"/jobs/{JOB}/timeline?rank=2489", "light"),
        "slower": (f"/jobs/{JOB}/slower", "dark"),
    },
    "switch lost": {"now": ("/", "light"), "ranks": (f"/jobs/{JOB}/ranks?rank=3336", "dark")},
}


@contextmanager
def served(source: RecordedCluster) -> Iterator[str]:
    """A dashboard in a thread of its own; yields its link."""
    access = Access("a-token-of-the-cluster")
    app = build(ClusterReader(source), access, LiveStreams(), hosts=["127.0.0.1"])
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/?token={access.key}"
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("no chromium: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=[*FLAGS])
        yield browser
        browser.close()


class Tab:
    """A tab of a fresh profile that has followed the link, with what its console said."""

    def __init__(self, chromium: Any, link: str, scheme: str = "light") -> None:
        self.said: list[str] = []
        size = {"width": 1320, "height": 860}
        self._context = chromium.new_context(viewport=size, color_scheme=scheme)
        self.page = self._context.new_page()
        self.page.on("console", lambda message: self._said(message.type, message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.goto(link)
        self.base = link.partition("/?")[0]

    def _said(self, kind: str, text: str) -> None:
        if kind in ("error", "warning"):
            self.said.append(text)

    def open(self, path: str) -> float:
        """Load a page; returns the seconds until it is drawn."""
        began_s = time.monotonic()
        self.page.goto(self.base + path, wait_until="commit")
        self.page.wait_for_selector("main:not([aria-busy]) h1")
        return time.monotonic() - began_s

    def close(self) -> None:
        self._context.close()


@pytest.fixture(scope="module")
def lost(chromium: Any) -> Iterator[Tab]:
    with served(RecordedCluster("node lost")) as link:
        tab = Tab(chromium, link)
        yield tab
        tab.close()


@pytest.mark.parametrize("path", PAGES)
def test_every_page_is_drawn_within_a_second_without_a_word_on_the_console(
    lost: Tab, path: str
) -> None:
    # The best of three: another process may hold the processor for one of them. Where others hold
    # it for all, the processor time of dashboard and browser together counts.
    times_s, processor_s = [], []
    for _ in range(3):
        before_s = processor_time.of_family_s()
        times_s.append(lost.open(path))
        processor_s.append(processor_time.of_family_s() - before_s)
    print(f"{path}: {min(times_s):.3f} s, {min(processor_s):.2f} s of processor time")
    assert min(*times_s, *processor_s) < LOADED_S
    assert lost.said == []


COUNTED = """
window.counts = { paints: 0, formats: 0 };
for (const [owner, name, count] of [
  [CanvasRenderingContext2D.prototype, "clearRect", "paints"],
  [Number.prototype, "toLocaleString", "formats"],
]) {
  const usual = owner[name];
  owner[name] = function (...given) { window.counts[count] += 1; return usual.apply(this, given); };
}
"""


def test_what_made_two_pages_slow_is_done_once(chromium: Any) -> None:
    """12,160 ranks were painted twice, and 3,040 numbers made a formatter each."""
    with served(RecordedCluster("node lost")) as link:
        tab = Tab(chromium, link)
        tab.page.add_init_script(COUNTED)
        tab.open(f"/jobs/{JOB}/ranks?rank=3336")
        tab.page.wait_for_function("window.counts.paints > 0")
        tab.page.evaluate(
            "() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
        )
        assert tab.page.evaluate("window.counts.paints") == 1
        tab.open(f"/jobs/{JOB}/heat")
        assert tab.page.evaluate("window.counts.formats") <= 10
        tab.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_fault(chromium: Any, scheme: str) -> None:
    with served(RecordedCluster("node lost")) as link:
        tab = Tab(chromium, link, scheme)
        for path in PAGES:
            tab.open(path)
            # The policy of the page forbids foreign scripts; evaluate is not under it.
            tab.page.evaluate(AXE.read_text())
            found = tab.page.evaluate("async () => (await axe.run()).violations")
            bad = [
                (each["id"], [node["html"][:120] for node in each["nodes"][:3]])
                for each in cast(list[dict[str, Any]], found)
                if each["impact"] in ("serious", "critical")
            ]
            assert bad == [], path
        tab.close()


def test_keys_filter_and_history_lead_to_every_node(lost: Tab) -> None:
    lost.open("/")
    lost.page.keyboard.press("f")
    lost.page.wait_for_selector(".cell")
    lost.page.keyboard.press("/")
    lost.page.keyboard.type("dead")
    lost.page.wait_for_url("**/fleet?filter=dead")
    assert lost.page.locator("tbody tr").count() == 1
    assert lost.page.locator(".cell:not(.dim)").count() == 1
    # Tab reaches the switch, arrows its nodes.
    lost.page.locator(".cells").nth(1).focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        lost.page.keyboard.press(key)
    lost.page.keyboard.press("Enter")
    lost.page.wait_for_url("**/nodes/n73")


def test_a_rank_is_selected_by_key_and_its_url_stays(lost: Tab) -> None:
    lost.open(f"/jobs/{JOB}/ranks?rank=3336")
    lost.page.locator("canvas").focus()
    lost.page.keyboard.press(".")
    lost.page.wait_for_url("**/ranks?rank=3337")
    assert lost.page.locator(".rank h2").inner_text() == "Rank 3337"
    assert "n1520" in lost.page.locator(".rank").inner_text()  # the spare in n417's place


def test_the_timeline_is_read_with_keys_alone_and_its_url_keeps_the_steps(lost: Tab) -> None:
    lost.open(f"/jobs/{JOB}/timeline?rank=2489")
    lost.page.wait_for_url(f"**/timeline?rank=2489&group=pp&steps=1&step={STEP - 1}")
    chosen = lost.page.locator(".chosen")
    assert chosen.inner_text().startswith("Rank 2489 on n311: computes")
    lost.page.locator("canvas").focus()
    for key in ("+", "ArrowDown", ".", ".", "."):
        lost.page.keyboard.press(key)
    # The third stage waits for the first activation; then it computes.
    assert "Rank 4009 on n501: forward, 92.0 ms" in chosen.inner_text()
    assert "micro-batch 0" in chosen.inner_text()
    lost.page.locator("text=Earlier").click()
    lost.page.wait_for_url(f"**step={STEP - 2}")
    lost.page.wait_for_selector("main:not([aria-busy]) canvas")
    lost.page.keyboard.press("/")
    lost.page.keyboard.press("Control+a")
    lost.page.keyboard.type("12159")
    lost.page.keyboard.press("Enter")
    lost.page.locator(".chosen", has_text="Rank 12159").wait_for()


def test_a_hang_shows_who_waits_and_how_far_each_got(chromium: Any) -> None:
    with served(RecordedCluster("hang")) as link:
        tab = Tab(chromium, link)
        tab.open(f"/jobs/{JOB}/ranks?rank={SILENT + 8}")
        first = tab.page.locator("tbody tr").first.inner_text()
        assert "5,003 holds the others up" in first and "dp 411 / 411 behind" in first
        assert tab.page.locator("tbody tr").nth(1).inner_text().count("behind") == 0
        assert f"waits for {SILENT}" in tab.page.locator(".rank").inner_text()
        tab.close()


def test_the_tile_of_a_node_with_hot_experts_says_so(chromium: Any) -> None:
    with served(RecordedCluster("hot experts")) as link:
        tab = Tab(chromium, link)
        tab.open(f"/jobs/{JOB}/heat")
        assert "has hot experts" in tab.page.locator("h1").inner_text()
        tile = tab.page.locator(f'a.heat[href="/nodes/n{HOT // 8}"]')
        assert tile.get_attribute("title") == (
            f"n{HOT // 8}: +31.0 %, hot experts (1.8 times the mean rows)"
        )
        assert tab.page.locator('a.heat[title*="hot experts"]').count() == 1
        tab.close()


def test_scripts_are_small_and_from_this_host_alone(chromium: Any) -> None:
    with served(RecordedCluster("slow host")) as link:
        tab = Tab(chromium, link)
        asked: list[str] = []
        sizes: dict[str, int] = {}
        tab.page.on("request", lambda request: asked.append(request.url))
        tab.page.on(
            "response",
            lambda answer: (
                answer.url.endswith(".js") and sizes.update({answer.url: len(answer.body())})
            ),
        )
        tab.open(f"/jobs/{JOB}")
        tab.page.wait_for_load_state("load")
        assert {url for url in asked if not url.startswith((tab.base, "data:"))} == set()
        total = sum(sizes.values())
        print(f"{total} bytes of JavaScript in {len(sizes)} files")
        assert len(sizes) >= 8 and total < SCRIPT_BYTES
        tab.close()


def test_a_change_arrives_by_itself(chromium: Any) -> None:
    source = RecordedCluster("healthy", nodes=4)
    with served(source) as link:
        tab = Tab(chromium, link)
        tab.open("/fleet")
        assert "4 nodes" in tab.page.locator("h1").inner_text()
        source._nodes.pop()
        tab.page.locator("h1", has_text="3 nodes").wait_for()
        tab.close()


def test_empty_and_missing_are_said(chromium: Any) -> None:
    with served(RecordedCluster(nodes=0, jobs=False)) as link:
        tab = Tab(chromium, link)
        for path, said in (
            ("/", "No node has joined"),
            ("/fleet", "megascale up"),
            ("/jobs", "megascale submit"),
            ("/jobs/other", "Not found"),
        ):
            tab.open(path)
            assert said in tab.page.locator("main").inner_text()
        tab.page.locator("text=Log out").click()
        tab.page.wait_for_selector("#token")
        tab.close()


@pytest.mark.skipif(not os.environ.get("MEGASCALE_SCREENSHOTS"), reason="SCREENSHOTS=1 writes them")
@pytest.mark.parametrize("situation", list(SHOTS))
def test_screenshots(chromium: Any, situation: Situation) -> None:
    IMAGES.mkdir(exist_ok=True)
    with served(RecordedCluster(situation)) as link:
        for name, (path, scheme) in SHOTS[situation].items():
            tab = Tab(chromium, link, scheme)
            tab.open(path)
            tab.page.wait_for_timeout(300)  # curves are drawn in the next frame
            file = f"dashboard-{situation.replace(' ', '-')}-{name}.png"
            tab.page.screenshot(path=IMAGES / file)
            tab.close()
            image = pytest.importorskip("PIL.Image")  # of the extra plot; it makes them small
            with image.open(IMAGES / file) as shot:
                # By coverage: small spots of a legend keep their colours.
                method, dither = image.Quantize.MAXCOVERAGE, image.Dither.NONE
                small = shot.convert("RGB").quantize(256, method=method, dither=dither)
            small.save(IMAGES / file, optimize=True)
