// Why a job is slower than its plan, and than before.
import { chip, h, number, percent, table } from "./dom.js";

const time = (seconds) => Math.abs(seconds) < 1 ? `${number(1000 * seconds)} ms` : `${number(seconds, 2)} s`;
const words = (name) => name.replaceAll("_", " ");

// The parts of a step, measured and planned, as two bars of one scale.
export function planned(plan) {
  if (!plan) return null;
  const head = h("h2", {}, plan.slower_by ? "Differs from plan" : "Compared with plan");
  if (plan.problem) return h("section", {}, head, h("p", { class: "state" }, plan.problem));
  const most = Math.max(...plan.terms.flatMap((each) => [each.measured_s, each.planned_s]), 1e-12);
  const bar = (value, kind) => h("span", { class: `term ${kind}` }, h("i", { width_pct: 100 * value / most }));
  return h("section", {}, head, h("p", { class: "sentence" }, plan.sentence),
    plan.terms.length ? table(["part of a step", "measured", "planned", "difference", ""], plan.terms.map((each) => [
      each.term === plan.slower_by ? h("b", {}, words(each.term)) : words(each.term), time(each.measured_s), time(each.planned_s),
      `${each.measured_s >= each.planned_s ? "+" : "\u2212"}${time(Math.abs(each.measured_s - each.planned_s))}`,
      h("span", { class: "terms", "aria-hidden": "true" }, bar(each.measured_s, "measured"), bar(each.planned_s, "planned"))]), "parts of a step") : null,
    h("p", { class: "under" }, `Steps ${number(plan.first_step)} to ${number(plan.last_step)} of attempt ${plan.attempt}; predicted ${plan.hardware}`));
}

export function slower(data) {
  const found = data.decline;
  return [
    h("h1", {}, found ? found.sentence : `Why ${data.name} is slower`),
    h("p", { class: "under" }, "Job ", h("a", { href: `/jobs/${data.name}` }, data.name), " ", chip(data.phase)),
    found && found.last_step ? h("section", {}, h("h2", {}, "Compared with earlier steps"),
      h("p", {}, `Steps ${number(found.first_step)} to ${number(found.split_step - 1)}: ${number(found.before_ms, 1)} ms; steps ${number(found.split_step)} to ${number(found.last_step)}: ${number(found.after_ms, 1)} ms. `,
        found.node ? ["It is largest on ", h("a", { href: `/nodes/${found.node}` }, found.node), found.rank === null ? "." : `, rank ${found.rank}.`] : ""),
      Object.keys(found.shares).length ? table(["possible cause", "part of the growth", ""], Object.entries(found.shares).map(([cause, share]) => [
        cause === found.cause ? h("b", {}, words(cause)) : words(cause), percent(share, 0),
        h("span", { class: "terms", "aria-hidden": "true" }, h("span", { class: "term measured" }, h("i", { width_pct: 100 * Math.min(1, share) })))]), "candidates") : null) : null,
    data.problem ? h("p", { class: "state" }, data.problem) : null,
    planned(data.plan) || h("p", { class: "state" }, "There is no comparison with a plan yet: it needs some steps of a running attempt."),
  ];
}
