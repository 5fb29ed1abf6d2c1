// Curves over the steps, one plot for each figure, with one cursor.
import { counted, h, short, span } from "./dom.js";

const kinds = [
  ["loss", "Loss", (value) => value.toFixed(3)],
  ["tokens_per_s", "Tokens/s", short],
  ["mfu", "MFU", (value) => `${(100 * value).toFixed(1)} %`],
  ["step_s", "Step time", span],
];
const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// An attempt that repeats steps goes back on the axis; sorted by step, the newest attempt counts.
function bySteps(data) {
  const newest = new Map();
  data.step.forEach((step, at) => newest.set(step, at));
  const order = [...newest.keys()].sort((a, b) => a - b);
  return { steps: order, pick: (name) => order.map((step) => data[name][newest.get(step)]) };
}

export function curves(data, heldOut) {
  const { steps, pick } = bySteps(data);
  const box = h("div", { class: "plots" });
  const drawn = kinds.map(([name, title, show]) => [title, show, steps, pick(name)]);
  drawn.splice(1, 0, ["Held-out loss", kinds[0][2], heldOut.step, heldOut.loss]);
  for (const [title, show, steps, values] of drawn) {
    const known = values.filter((value) => value !== null && Number.isFinite(value));
    if (!known.length) continue;
    const last = known[known.length - 1];
    const figure = h("figure", {}, h("figcaption", {}, title, h("b", {}, ` ${show(last)}`), h("span", {})));
    const plot = h("div", { class: "plot", role: "img", "aria-label": `${title} over ${counted(steps.length, "step")}: from ${show(known[0])} to ${show(last)}, lowest ${show(Math.min(...known))}, highest ${show(Math.max(...known))}` });
    figure.append(plot);
    box.append(figure);
    requestAnimationFrame(() => draw(plot, figure.querySelector("span"), steps, values, show));
  }
  return box;
}

function draw(plot, under, steps, values, show) {
  const axis = { stroke: colour("--quiet"), grid: { stroke: colour("--line"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
  const made = new uPlot({
    width: Math.max(200, plot.clientWidth), height: 170, cursor: { sync: { key: "steps" } }, legend: { show: false },
    hooks: { setCursor: [(each) => {
      const value = each.cursor.idx === null || each.cursor.idx === undefined ? null : values[each.cursor.idx];
      under.textContent = value === null || value === undefined ? "" : ` step ${steps[each.cursor.idx].toLocaleString("en")}: ${show(value)}`;
    }] },
    scales: { x: { time: false } },
    axes: [axis, { ...axis, size: 62, values: (_, ticks) => ticks.map((tick) => show(tick)) }],
    series: [{}, { stroke: colour("--accent"), width: 1.75, points: { show: steps.length < 40 } }],
  }, [steps, values], plot);
  const observer = new ResizeObserver(() => plot.isConnected
    ? made.setSize({ width: Math.max(200, plot.clientWidth), height: 170 }) : (observer.disconnect(), made.destroy()));
  observer.observe(plot);
}
