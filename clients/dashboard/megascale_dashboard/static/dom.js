// Elements and formats that all pages use. Text goes into the page as text, never as HTML.

export function h(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "width_pct") element.style.width = `${value}%`;
    else if (name === "left_pct") element.style.left = `${value}%`;
    else element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(9).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const missing = "\u2013";
// One formatter for each number of digits: toLocaleString makes one at every call, 57 us each.
const formats = new Map();
const format = (digits) => {
  if (!formats.has(digits)) formats.set(digits, new Intl.NumberFormat("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  return formats.get(digits);
};
export const number = (value, digits = 0) => value === null || value === undefined ? missing : format(digits).format(value);
// A number and what it counts, in the plural unless it is one.
export const counted = (value, thing) => `${number(value)} ${thing}${value === 1 ? "" : "s"}`;
export const percent = (value, digits = 1) =>
  value === null || value === undefined ? missing : `${number(100 * value, digits)} %`;
export const short = (value) =>
  value === null || value === undefined ? missing
    : value.toLocaleString("en", { notation: "compact", maximumSignificantDigits: 4 });

export function bytes(value) {
  if (!value) return missing;
  const power = Math.min(5, Math.floor(Math.log2(value) / 10));
  return `${number(value / 1024 ** power, power > 1 ? 1 : 0)} ${["B", "KiB", "MiB", "GiB", "TiB", "PiB"][power]}`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return missing;
  if (seconds < 1) return `${number(1000 * seconds)} ms`;
  if (seconds < 60) return `${number(seconds, seconds < 10 ? 1 : 0)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  const hours = Math.floor(minutes / 60);
  if (hours < 48) return `${hours} h ${minutes % 60} min`;
  return `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

// A moment as an age that is updated every second; its title has the date.
export function ago(time_s, after = " ago") {
  if (!time_s) return missing;
  const date = new Date(1000 * time_s);
  const element = h("time", { datetime: date.toISOString(), title: date.toLocaleString() });
  element.dataset.after = after;
  passed(element);
  return element;
}
function passed(element) {
  const seconds = Math.max(0, Date.now() / 1000 - Date.parse(element.dateTime) / 1000);
  element.textContent = span(seconds < 60 ? Math.floor(seconds) || 0.999 : seconds)
    .replace("999 ms", "0 s").replace(/(\d)\.0 s/, "$1 s") + element.dataset.after;
}
setInterval(() => document.querySelectorAll("time[data-after]").forEach(passed), 1000);

export const clock = (time_s) => time_s ? h("time",
  { datetime: new Date(1000 * time_s).toISOString(), title: new Date(1000 * time_s).toLocaleString() },
  new Date(1000 * time_s).toLocaleTimeString("en-GB")) : missing;

// A word in its colour, with a sign for readers who do not see colours.
const signs = {
  active: "\u25cf", running: "\u25cf", training: "\u25cf", pass: "\u2713", succeeded: "\u2713", handled: "\u2713",
  spare: "\u25cb", idle: "\u25cb", queued: "\u25cb", dead: "\u2715", failed: "\u2715", fail: "\u2715", lost: "\u2715", culprit: "\u2715", act: "!",
  suspect: "?", unknown: "?", silent: "?", degraded: "\u25bd", watch: "\u25b3",
  quarantined: "\u2298", cordoned: "\u2298", draining: "\u2298", cancelled: "\u2298", suspended: "\u2016",
};
export const sign = (word) => signs[word] || "\u25cb";
export const chip = (word, more = "", shown = word) =>
  h("span", { class: `chip tone-${word}` }, h("span", { "aria-hidden": "true" }, sign(word)), ` ${shown}${more}`);

export function command(each) {
  const button = h("button", {
    type: "button", class: "copy", "aria-label": `Copy: ${each.command}`,
    onclick: async () => {
      await navigator.clipboard.writeText(each.command);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    },
  }, "copy");
  return h("li", {}, h("span", { class: "for" }, each.text), h("code", {}, each.command), button);
}
export const commands = (list, title = "What you can do") => list.length
  ? h("section", {}, h("h2", {}, title), h("ul", { class: "commands" }, list.map(command))) : null;

export function table(heads, rows, caption) {
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    h("table", {}, h("caption", { class: "hidden" }, caption),
      h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, cell)))))));
}

export const subjectLink = (subject) => /^(jobs|nodes)\/[^/]+$/.test(subject)
  ? h("a", { href: `/${subject}` }, subject) : subject || "cluster";

export function eventRows(events) {
  return h("ol", { class: "events" }, events.map((event) => h("li", {},
    clock(event.time_s), " ",
    h("span", { class: "reason" }, event.reason), " ", subjectLink(event.subject),
    h("p", {}, event.message),
    event.evidence.length || event.policy ? h("details", {}, h("summary", {}, "why"),
      h("dl", {},
        event.policy ? [h("dt", {}, "rule"), h("dd", {}, `${event.policy} (${event.mode || "always"})`)] : null,
        event.actor ? [h("dt", {}, "decided by"), h("dd", {}, event.actor)] : null,
        event.outcome ? [h("dt", {}, "outcome"), h("dd", {}, event.outcome)] : null,
        event.evidence.map((piece) => [h("dt", {}, piece.kind), h("dd", {}, [piece.source, piece.text, piece.uri].filter(Boolean).join(": "))]))) : null)));
}

// One stop of the tab key for each switch; arrows move inside.
export function moves(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 8, ArrowUp: -8 }[event.key];
  if (!step) return;
  const cells = [...event.currentTarget.querySelectorAll(".cell")];
  const at = Math.max(0, cells.indexOf(document.activeElement));
  cells[Math.min(cells.length - 1, Math.max(0, document.activeElement.classList.contains("cell") ? at + step : 0))].focus();
  event.preventDefault();
}
