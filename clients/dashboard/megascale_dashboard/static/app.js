// Fetches the twin of the page, draws it, and draws it anew when the server reports a change.
import { command, h } from "./dom.js";
import { view } from "./pages.js";

const main = document.getElementById("page");
const live = document.getElementById("live");
const twin = document.getElementById("twin").href;
let held = null;
let fetching = false;
let again = false;
let once = false;

const states = {
  "not-permitted": ["Not permitted", "Log in again."],
  missing: ["Not found", "It may have been deleted, or it has another name."],
  "not-possible": ["Not possible now", ""],
  away: ["The driver does not answer", "Training continues without it. This page tries again every few seconds."],
};

function report(state, text) {
  live.dataset.state = state;
  live.textContent = text;
}

function draw() {
  const focused = document.activeElement && document.activeElement.id;
  const open = new Set([...main.querySelectorAll("details[open]")].map((each) => each.parentElement.textContent.slice(0, 120)));
  const caret = focused === "filter" ? document.activeElement.selectionStart : null;
  main.replaceChildren(...view(location.pathname)(held).flat(3).filter(Boolean),
    held.command ? h("ul", { class: "commands" }, command({ text: "The same in a terminal", command: held.command })) : "");
  main.removeAttribute("aria-busy");
  for (const each of main.querySelectorAll("details")) if (open.has(each.parentElement.textContent.slice(0, 120))) each.open = true;
  if (focused === "filter") {
    const field = document.getElementById("filter");
    if (field) { field.focus(); if (caret !== null) field.setSelectionRange(caret, caret); }
  }
}

const sentence = (text) => !text || /[.!?]$/.test(text) ? text || "" : `${text}.`;

function fail(answer) {
  const [title, advice] = states[answer.state] || ["This page cannot be shown", ""];
  report("away", answer.state === "away" ? "driver away" : answer.state || "failed");
  if (answer.state === "away" && held) return; // keep the last known page
  main.removeAttribute("aria-busy");
  main.replaceChildren(h("h1", {}, title), h("p", { class: "state" }, sentence(answer.message), " ", advice),
    answer.state === "not-permitted" ? h("p", {}, h("a", { href: "/login", class: "button" }, "Log in")) : "");
}

async function load() {
  if (fetching) { again = true; return; }
  fetching = true;
  try {
    const response = await fetch(twin, { headers: { accept: "application/json" } });
    const answer = await response.json();
    if (response.ok) {
      held = answer;
      draw();
      report(once ? "loaded" : "live", once ? "as it was when loaded" : "live");
    } else fail(answer);
  } catch {
    fail({ state: "away", message: "The dashboard itself does not answer: start it with `megascale dashboard`." });
  } finally {
    fetching = false;
    if (again) { again = false; load(); }
  }
}

function listen() {
  const where = new URLSearchParams(location.search);
  where.delete("rank");
  where.delete("filter");
  where.set("page", location.pathname);
  const source = new EventSource(`/live?${where}`);
  let first = true;
  source.addEventListener("changed", () => { if (!first || live.dataset.state === "away") load(); first = false; });
  source.addEventListener("away", (event) => { first = false; fail({ state: "away", message: JSON.parse(event.data) }); });
  source.onerror = () => { report("away", "not connected"); if (source.readyState === EventSource.CLOSED) setTimeout(listen, 5000); };
  source.onopen = () => { if (held) report("live", "live"); };
  addEventListener("pagehide", () => source.close());
}

document.getElementById("theme").addEventListener("click", () => {
  const root = document.documentElement;
  const dark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  root.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("theme", root.dataset.theme);
  if (held) draw();
});
document.addEventListener("redraw", draw);
document.addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|TEXTAREA)$/.test(event.target.tagName)) return;
  const page = { n: "/", f: "/fleet", j: "/jobs", e: "/events" }[event.key];
  if (page) location.href = page;
  else if (event.key === "/") { const field = document.getElementById("filter"); if (field) { field.focus(); event.preventDefault(); } }
});
load();
if (location.pathname.endsWith("/timeline")) once = true; // a page that moved would be hard to read
else listen();
