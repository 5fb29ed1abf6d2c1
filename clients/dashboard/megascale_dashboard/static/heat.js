// Nodes by switch, coloured by their time compared with nodes that do the same work.
import { h, moves, number, table } from "./dom.js";

const REACH = 0.1; // the scale ends at 10 % below and above
const level = (ratio) => ratio === null ? "none" : Math.round(5 + 5 * Math.max(-1, Math.min(1, (ratio - 1) / REACH)));
const said = (ratio) => ratio === null ? "not measured" : `${ratio >= 1 ? "+" : "\u2212"}${number(100 * Math.abs(ratio - 1), 1)} %`;

export function heat(data) {
  if (!data.operations.length) {
    return [h("h1", {}, "Heat map of ", h("a", { href: `/jobs/${data.name}` }, data.name)),
      h("p", { class: "state" }, "No spans yet: they come with the first steps (trainer.telemetry.spans).")];
  }
  const wanted = new URLSearchParams(location.search).get("operation") || "";
  const chosen = data.operations.find((each) => each.operation === wanted);
  const hot = data.hot_nodes || {};
  const ratios = chosen ? chosen.ratios : data.worst;
  const pick = h("select", { id: "filter", onchange: () => {
    const url = new URL(location.href);
    if (pick.value) url.searchParams.set("operation", pick.value); else url.searchParams.delete("operation");
    history.replaceState(null, "", url);
    document.dispatchEvent(new Event("redraw"));
  } }, h("option", { value: "" }, "the worst of all operations"),
    data.operations.map((each) => h("option", { value: each.operation, selected: each === chosen },
      `${each.operation} (${each.kind}${each.median_ms === null ? "" : `, ${number(each.median_ms, 2)} ms a step`})`)));
  const bySwitch = new Map();
  data.nodes.forEach((node, at) => bySwitch.set(node.switch, [...bySwitch.get(node.switch) || [], [node.name, ratios[at]]]));
  return [
    h("h1", {}, data.headline),
    h("p", { class: "under" }, "Job ", h("a", { href: `/jobs/${data.name}` }, data.name),
      `, steps ${number(data.first_step)} to ${number(data.last_step)} of attempt ${data.attempt}; medians, compared with the ranks that do the same work`),
    data.slow.length > 1 ? table(["node", "rank", "operation", "takes", "since step", "in words"], data.slow.map((each) => [
      h("a", { href: `/nodes/${each.node}` }, each.node), number(each.rank), each.operation, said(each.ratio), number(each.since_step), each.sentence]), "slow nodes") : null,
    data.hot && data.hot.length && (data.hot.length > 1 || data.slow.length) ? table(["node", "rank", "rows of its experts", "operation", "takes", "since step", "in words"], data.hot.map((each) => [
      h("a", { href: `/nodes/${each.node}` }, each.node), number(each.rank), `${number(each.rows, 1)} of the mean`, each.operation, said(each.ratio), number(each.since_step), each.sentence]), "ranks with hot experts") : null,
    h("p", {}, h("label", { for: "filter" }, "Show "), pick),
    h("p", { class: "legend" }, h("span", { class: "key" }, "10 % faster"), h("span", { class: "scale", "aria-hidden": "true" },
      Array.from({ length: 11 }, (_, at) => h("i", { class: `heat-${at}` }))), h("span", { class: "key" }, "10 % slower or more (\u25b2)")),
    h("div", { class: "switches" }, [...bySwitch].map(([name, nodes]) => h("section", { class: "switch", "aria-label": `switch ${name || "not named"}` },
      h("h2", {}, name || "no switch", h("small", {}, ` ${nodes.length}`)),
      h("div", { class: "cells", tabindex: "0", role: "group", "aria-label": `nodes of switch ${name || "not named"}; arrows move`, onkeydown: moves },
        nodes.map(([node, ratio]) => cell(node, level(ratio), ratio >= 1 + REACH, `${node}: ${said(ratio)}${hot[node] ? `, ${hot[node]}` : ""}`)))))),
  ];
}

const cell = (node, at, marked, text) =>
  h("a", { href: `/nodes/${node}`, tabindex: "-1", class: `cell heat heat-${at}`, title: text, "aria-label": text }, marked ? "\u25b2" : "");
