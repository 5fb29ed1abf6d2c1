// The content of each page, from its JSON twin.
import { ago, bytes, chip, clock, commands, counted, eventRows, h, moves, number, percent, short, sign, span, subjectLink, table } from "./dom.js";
import { curves } from "./charts.js";
import { heat } from "./heat.js";
import { block } from "./ranks.js";
import { planned, slower } from "./slower.js";
import { timeline } from "./timeline.js";

const tile = (name, value, more) =>
  h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, value, more ? h("small", {}, more) : null));
const nothing = (text) => h("p", { class: "state" }, text);
const linked = (names) => names.map((name, at) => [at ? ", " : "", h("a", { href: `/nodes/${name}` }, name)]);

function progress(job) {
  const part = job.steps ? Math.min(1, job.step / job.steps) : 0;
  return h("div", { class: "bar", role: "progressbar", "aria-label": `steps of ${job.name}`, "aria-valuenow": job.step,
    "aria-valuemin": 0, "aria-valuemax": job.steps || 1 }, h("span", { width_pct: 100 * part }));
}

function jobCard(job) {
  return h("article", { class: "card" },
    h("h3", {}, h("a", { href: `/jobs/${job.name}` }, job.name), chip(job.phase)),
    progress(job),
    h("dl", { class: "tiles" },
      tile("step", number(job.step), ` of ${number(job.steps)}`),
      tile("loss", number(job.loss, 3)),
      tile("tokens/s", short(job.tokens_per_s)),
      tile("MFU", percent(job.mfu_causal)),
      tile("goodput", percent(job.goodput)),
      tile("last checkpoint", ago(job.committed_at_s))),
    job.phase === "running" ? null : h("p", {}, job.phase_reason));
}

const urgencies = { act: "needs attention", watch: "watch", handled: "handled" };

function incident(each) {
  return h("article", { class: `incident tone-${each.urgency}` },
    h("h3", {}, chip(each.urgency, "", urgencies[each.urgency]), " ", h("a", { href: each.page }, each.title)),
    h("dl", {},
      h("dt", {}, "Since"), h("dd", {}, each.since_s ? [clock(each.since_s), ", ", ago(each.since_s)] : "not recorded"),
      h("dt", {}, "The system"), h("dd", {}, each.doing.length ? h("ul", {}, each.doing.map((text) => h("li", {}, text))) : "has not acted yet"),
      h("dt", {}, "You can"), h("dd", {}, each.may_do.length
        ? commands(each.may_do, "").querySelector("ul") : "No action needed")));
}

function now(data) {
  const { act, watch, handled } = data.counts;
  return [
    h("h1", { class: `headline tone-${act ? "act" : watch ? "watch" : "handled"}` }, data.sentence),
    h("p", { class: "under" }, `Cluster ${data.cluster.name}, ${data.cluster.nodes_alive} of ${counted(data.cluster.nodes, "node")} alive; `,
      "driver ", data.cluster.leader || "unknown", " has led for ", ago(data.cluster.leader_since_s, ""),
      handled ? `; ${counted(handled, "fault")} handled in the last hour` : ""),
    data.incidents.length ? h("section", {}, h("h2", {}, "Problems"), data.incidents.map(incident)) : null,
    data.left_out ? nothing(`${data.left_out} more are not shown.`) : null,
    h("section", {}, h("h2", {}, "Jobs"), data.jobs.length ? h("div", { class: "cards" }, data.jobs.map(jobCard))
      : nothing("No job is in progress. Submit one: megascale submit job.yaml")),
    data.events.length ? h("section", {}, h("h2", {}, "Newest events"), eventRows(data.events)) : null,
  ];
}

function cell(node, shown) {
  const mark = node.health === "fail" || node.health === "degraded" ? node.health : node.state;
  const plain = ["active", "spare", "idle"].includes(node.state) && mark === node.state;
  const text = `${node.name}: ${node.state}${node.health ? `, checks ${node.health}` : ""}${node.job ? `, job ${node.job}` : ""}`;
  return h("a", { href: `/nodes/${node.name}`, class: `cell tone-${mark}${shown ? "" : " dim"}`, title: text, "aria-label": text, tabindex: "-1" },
    plain ? "" : sign(mark));
}

function fleet(data) {
  if (!data.nodes) return [h("h1", {}, "Fleet"), nothing("No node has joined. Start a cluster: megascale up --nodes 3")];
  const wanted = new URLSearchParams(location.search).get("filter") || "";
  const fits = (node) => !wanted || [node.name, node.state, node.health, node.job].some((text) => text.includes(wanted));
  const filter = h("input", { id: "filter", type: "search", value: wanted, placeholder: "name, state or job", autocomplete: "off",
    oninput: () => {
      const url = new URL(location.href);
      if (filter.value) url.searchParams.set("filter", filter.value); else url.searchParams.delete("filter");
      history.replaceState(null, "", url);
      document.dispatchEvent(new Event("redraw"));
    } });
  return [
    h("h1", {}, `${counted(data.nodes, "node")}, ${counted(data.devices, "device")}`),
    h("p", { class: "legend" }, Object.entries(data.states).map(([word, count]) => chip(word, ` ${number(count)}`)),
      Object.entries(data.health).filter(([word]) => word !== "pass").map(([word, count]) => chip(word, ` ${number(count)}`))),
    h("p", {}, h("label", { for: "filter" }, "Show "), filter),
    h("section", {}, h("h2", {}, "By switch"), h("div", { class: "switches" }, data.switches.map((each) =>
      h("section", { class: "switch", "aria-label": `switch ${each.name || "not named"}` },
        h("h3", {}, each.name || "no switch", h("small", {}, ` ${each.nodes.length}`)),
        h("div", { class: "cells", tabindex: "0", role: "group", "aria-label": `nodes of switch ${each.name || "not named"}; arrows move`, onkeydown: moves },
          each.nodes.map((node) => cell(node, fits(node)))))))),
    h("section", {}, h("h2", {}, "Needs attention"), data.unhealthy.length
      ? table(["node", "state", "checks", "switch", "job", "why"], data.unhealthy.filter(fits).map((node) => [
        h("a", { href: `/nodes/${node.name}` }, node.name), chip(node.state), node.health ? chip(node.health) : "", node.switch,
        node.job ? h("a", { href: `/jobs/${node.job}` }, node.job) : "", node.why]), "nodes that need attention")
      : nothing("All nodes are healthy.")),
  ];
}

function jobs(data) {
  return [h("h1", {}, "Jobs"), data.jobs.length
    ? table(["job", "phase", "step", "loss", "tokens/s", "MFU", "goodput", "restarts", "checkpoint"], data.jobs.map((job) => [
      h("a", { href: `/jobs/${job.name}` }, job.name), chip(job.phase), `${number(job.step)} / ${number(job.steps)}`,
      number(job.loss, 3), short(job.tokens_per_s), percent(job.mfu_causal), percent(job.goodput), number(job.restarts),
      ago(job.committed_at_s)]), "all jobs")
    : nothing("No job has been submitted. Submit one: megascale submit job.yaml")];
}

function attemptCount(attempts) {
  const failed = attempts.filter((each) => each.failed).length;
  return `${counted(attempts.length, "attempt")}${failed ? `, ${failed} of them failed (red)` : ""}`;
}

function ribbon(attempts) {
  if (!attempts.length) return nothing("No attempt has been opened yet.");
  const first = attempts[0].opened_s;
  const last = Math.max(...attempts.map((each) => each.ended_s || Date.now() / 1000));
  const at = (time_s) => 100 * (time_s - first) / Math.max(1, last - first);
  return [
    h("div", { class: "ribbon", "aria-hidden": "true" }, attempts.map((each) => {
      const end = each.ended_s || last;
      const from = at(each.opened_s);
      const middle = at(each.running_s || end);
      return [h("span", { class: "starting", left_pct: from, width_pct: Math.max(0.15, middle - from) }),
        each.running_s ? h("span", { class: each.failed ? "running failed" : "running", title: each.ending, left_pct: middle, width_pct: Math.max(0.15, at(end) - middle) },
          at(end) - middle > 4 ? String(each.attempt) : "") : null];
    })),
    h("details", {}, h("summary", {}, attemptCount(attempts)),
      table(["attempt", "opened", "until all ran", "lasted", "began with", "ended because"], attempts.slice().reverse().map((each) => [
        number(each.attempt), clock(each.opened_s), each.running_s ? span(each.running_s - each.opened_s) : "",
        span((each.ended_s || last) - each.opened_s), each.opening, each.ended_s ? each.ending || "" : "in progress"]), "attempts")),
  ];
}

function goodputBar(parts) {
  const total = Object.values(parts).reduce((sum, each) => sum + each, 0);
  if (!total) return null;
  const some = Object.entries(parts).filter(([, value]) => value > 0);
  return h("section", {}, h("h2", {}, "Where the time went"),
    h("div", { class: "stack", "aria-hidden": "true" }, some.map(([name, value]) =>
      h("span", { class: `part-${name}`, width_pct: 100 * value / total }))),
    h("p", { class: "legend" }, some.map(([name, value]) =>
      h("span", { class: "key" }, h("i", { class: `part-${name}` }), `${name} ${span(value)} (${percent(value / total)})`))));
}

function whySection(why) {
  return h("section", { class: "why" }, h("h2", {}, "Why it is in this phase"), h("p", { class: "sentence" }, why.sentence),
    why.root ? h("p", {}, `The logs of attempt ${why.root.attempt} name the root cause on `, h("a", { href: `/nodes/${why.root.node}` }, why.root.node),
      why.root.rank === null ? ", its kernel" : `, rank ${why.root.rank}`, ` (${why.root.category}): `, h("code", {}, why.root.line)) : null,
    why.cause || why.actions.length ? h("dl", {},
      why.cause ? [h("dt", {}, "What happened"), h("dd", {}, why.cause.message, " (", why.cause.time_s ? ago(why.cause.time_s) : "now", ")")] : null,
      why.actions.length ? [h("dt", {}, "What the system did"), h("dd", {}, h("ol", {}, why.actions.map((each) => h("li", {}, each.message))))] : null) : null);
}

function job(data) {
  const eta = data.remaining_s === null ? "\u2013" : span(data.remaining_s);
  const done = data.remaining_s === null ? "" : ` ${new Date(Date.now() + 1000 * data.remaining_s).toLocaleString("en-GB", { dateStyle: "medium", timeStyle: "short" })}`;
  return [
    h("h1", {}, data.name, " ", chip(data.phase)),
    h("p", { class: "under" }, data.phase_reason),
    progress(data),
    h("dl", { class: "tiles wide" },
      tile("step", number(data.step), ` of ${number(data.steps)}`), tile("loss", number(data.loss, 4)),
      data.held_out_loss === null ? null : tile("held-out loss", number(data.held_out_loss, 4), ` after step ${number(data.held_out_step)}`),
      tile("tokens/s", short(data.tokens_per_s)), tile("MFU", percent(data.mfu_causal), data.mfu_full === null ? "" : ` ${percent(data.mfu_full)} with full attention`),
      tile("goodput", percent(data.goodput), " since the start"), tile("time to the end", eta, done),
      tile("checkpoint", data.committed_step ? `step ${number(data.committed_step)}` : "none yet", data.committed_at_s ? [" ", ago(data.committed_at_s)] : ""),
      tile("replica in memory", data.replicated_step ? `step ${number(data.replicated_step)}` : "\u2013", data.replica_problem ? ` ${data.replica_problem}` : "")),
    data.conditions.map((each) => h("p", { class: "problem" }, each.message, " (", ago(each.since_s), ")")),
    h("p", {}, h("a", { href: `/jobs/${data.name}/ranks`, class: "button" }, `Ranks: ${Object.entries(data.layout).filter(([, size]) => size > 1).map(([axis, size]) => `${axis} ${size}`).join(" \u00d7 ") || "one"}`), " ",
      h("a", { href: `/jobs/${data.name}/heat`, class: "button" }, "Heat map: who is slow"), " ",
      h("a", { href: `/jobs/${data.name}/timeline`, class: "button" }, "Timeline: where a step's time goes"), " ",
      h("a", { href: `/jobs/${data.name}/slower`, class: "button" }, "Why it is slower")),
    h("section", {}, h("h2", {}, "Attempts"), ribbon(data.attempts)),
    h("section", {}, h("h2", {}, "Steps"), data.curves.step.length ? curves(data.curves, data.held_out_curve) : nothing("No step has been completed yet.")),
    whySection(data.why),
    planned(data.plan),
    commands([...data.why.suggestions, ...data.commands]),
    goodputBar(data.goodput_parts_s),
    h("section", {}, h("h2", {}, "Nodes"), h("p", {}, data.node_names.length ? linked(data.node_names.slice(0, 64)) : "none",
      data.node_names.length > 64 ? ` and ${data.node_names.length - 64} more` : ""),
      data.spare_names.length ? h("p", {}, "Spares: ", linked(data.spare_names.slice(0, 32))) : null,
      data.evicted_names.length ? h("p", {}, "Evicted after faults: ", linked(data.evicted_names.slice(0, 32))) : null),
    h("section", {}, h("h2", {}, "Checkpoints"), data.checkpoints.length
      ? table(["step", "attempt", "size", "complete", "kept because"], data.checkpoints.map((each) => [number(each.step), number(each.attempt),
        bytes(each.size_bytes), ago(each.committed_at_s), each.pin]), "newest checkpoints")
      : nothing("No checkpoint is complete yet, or no daemon can list them now.")),
    h("section", {}, h("h2", {}, "Events"), data.events.length ? eventRows(data.events) : nothing("No events yet.")),
  ];
}

function node(data) {
  return [
    h("h1", {}, data.name, " ", chip(data.state), data.health ? chip(data.health) : null),
    data.why ? h("p", { class: "problem" }, data.why) : null,
    h("dl", { class: "tiles wide" },
      tile("liveness", data.liveness), tile("disposition", data.disposition), tile("assignment", data.assignment),
      tile("last heartbeat", ago(data.last_heartbeat_s)), tile("switch", data.switch || "\u2013"),
      tile("devices", number(data.devices.length), data.devices.length ? ` ${data.devices[0].model}` : ""),
      tile("job", data.job ? h("a", { href: `/jobs/${data.job}` }, data.job) : "none", data.ranks.length ? ` ranks ${data.ranks[0]}\u2013${data.ranks[data.ranks.length - 1]}` : "")),
    h("section", {}, h("h2", {}, "Diagnostics"), data.checks.length
      ? table(["check", "of", "verdict", "measured", "usual here", "detail"], data.checks.map((each) => [each.name, each.target, chip(each.verdict),
        each.value === null ? "" : `${short(each.value)} ${each.unit}`,
        each.baseline === null ? "" : `${short(each.baseline)} ${each.unit}${each.z === null ? "" : ` (z ${number(each.z, 1)})`}`, each.detail]), "newest diagnostics")
      : nothing("No check has run here yet.")),
    commands(data.commands),
    h("section", {}, h("h2", {}, "Events"), data.events.length ? eventRows(data.events) : nothing("The driver's log has no events of this node.")),
  ];
}

function events(data) {
  const input = h("input", { id: "filter", name: "subject", value: data.subject, placeholder: "jobs/NAME, nodes/NAME, cluster" });
  return [
    h("h1", {}, "Events", data.subject ? ` of ${data.subject}` : ""),
    h("form", { action: "/events" }, h("label", { for: "filter" }, "About "), input, " ", h("button", {}, "Show")),
    data.full ? nothing("These are the newest 2,000; for older ones: megascale events --all") : null,
    data.events.length ? eventRows(data.events.slice(0, 500)) : nothing("No events yet."),
    data.events.length > 500 ? nothing(`${data.events.length - 500} older ones are in the JSON twin.`) : null,
  ];
}

export function view(path) {
  if (path === "/") return now;
  if (path === "/fleet") return fleet;
  if (path === "/jobs") return jobs;
  if (path === "/events") return events;
  if (path.startsWith("/nodes/")) return node;
  if (path.endsWith("/heat")) return heat;
  if (path.endsWith("/timeline")) return timeline;
  if (path.endsWith("/slower")) return slower;
  return path.endsWith("/ranks") ? block : job;
}
