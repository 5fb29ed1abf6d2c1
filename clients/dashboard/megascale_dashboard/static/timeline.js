// A few steps of the ranks of one group on one clock: a row for each rank, a lane for each stream,
// drawn on a canvas that keys and mouse move and stretch; the same in figures in a table.
import { chip, counted, h, number, percent, span, table } from "./dom.js";

const GUTTER = 132;
const HEAD = 34;
const LANE = 15;
const GAP = 9;
const names = { pp: "pipeline", dp: "data", tp: "tensor" };
// By the begin of an operation's name; waiting is paler than working.
const tones = [["forward", "--axis-dp"], ["backward", "--good"], ["receive", "--warn"], ["send", "--quiet"], ["optimizer", "--axis-tp"],
  ["data_wait", "--bad"], ["garbage", "--bad"], ["snapshot", "--calm"], ["", "--axis-pp"]];
const toneOf = (name) => tones.findIndex(([begin]) => name.startsWith(begin));
const state = { key: "", from: 0, to: 1, row: 0, chosen: -1 };

const ms = (us) => us >= 1e6 ? `${number(us / 1e6, 3)} s` : us >= 100 ? `${number(us / 1000, us < 1e4 ? 2 : 1)} ms` : `${number(us)} \u00b5s`;
const extent = (data) => {
  const begin = Math.min(...data.steps.map((each) => each.at_us));
  return [begin, Math.max(...data.steps.map((each) => each.at_us + each.for_us))];
};
const place = (data, changes) => {
  const url = new URL(location.href);
  for (const [name, value] of Object.entries({ rank: data.rank, group: data.group, steps: data.steps.length || 1, step: data.steps.length ? data.steps[0].step : 0, ...data.beside ? { beside: data.beside.step } : {}, ...changes })) url.searchParams.set(name, value);
  return url.pathname + url.search;
};

function picks(data) {
  const several = Object.keys(names).filter((axis) => data.axes[axis] > 1);
  const first = data.steps[0].step;
  return h("form", { class: "picks", action: location.pathname },
    h("label", {}, "Rank ", h("input", { id: "filter", name: "rank", type: "number", min: 0, value: data.rank })),
    h("label", {}, "Group ", h("select", { name: "group" }, (several.length ? several : ["pp"]).map((axis) =>
      h("option", { value: axis, selected: axis === data.group }, `${names[axis]} (${axis} ${data.axes[axis]})`)))),
    h("label", {}, "Steps ", h("select", { name: "steps" }, [1, 2, 3, 5, 10].map((count) =>
      h("option", { value: count, selected: count === data.steps.length }, count)))),
    h("label", {}, "from step ", h("input", { name: "step", type: "number", min: 0, value: first })),
    h("label", {}, "compare with step ", h("input", { name: "beside", type: "number", min: 0, value: data.beside ? data.beside.step : "", placeholder: "a good one" })),
    h("button", {}, "Show"),
    h("a", { class: "button", href: place(data, { step: Math.max(1, first - data.steps.length) }) }, "Earlier"),
    h("a", { class: "button", href: place(data, { step: 0 }) }, "Newest"));
}

export function timeline(data) {
  const title = h("h1", {}, "Timeline of ", h("a", { href: `/jobs/${data.name}` }, data.name), " ", chip(data.phase));
  if (!data.steps.length) return [title, h("p", { class: "state" }, "These ranks have no spans of these steps.")];
  const key = place(data, {});
  history.replaceState(null, "", key); // so that the address keeps showing these steps
  if (state.key !== key) Object.assign(state, { key, row: Math.max(0, data.rows.findIndex((each) => each.rank === data.rank)), chosen: -1 }, whole(data));
  const height = HEAD + data.rows.length * (data.lanes.length * LANE + GAP);
  const canvas = h("canvas", { class: "timeline", tabindex: "0", role: "img", "aria-label":
    `${counted(data.rows.length, "rank")} of a ${names[data.group]} group over ${counted(data.steps.length, "step")}; arrows move and choose a rank, plus and minus stretch, comma and full stop choose a span, 0 shows all` });
  canvas.style.height = `${height}px`;
  const aside = h("p", { class: "chosen", "aria-live": "polite" });
  listen(canvas, data, () => { paint(canvas, data); describe(aside, data); });
  new ResizeObserver(() => canvas.isConnected && paint(canvas, data)).observe(canvas); // also of its first size
  describe(aside, data);
  const shown = data.rows.length < data.members ? `${data.rows.length} of ${number(data.members)}` : number(data.members);
  return [
    title,
    h("p", { class: "under" }, `${shown} rank${data.members === 1 ? "" : "s"} of the ${names[data.group]} group of rank ${data.rank}, `,
      data.steps.map((each) => `step ${number(each.step)}: ${ms(each.for_us)}`).join("; "),
      data.left_out ? `; the ${counted(data.left_out, "shortest span")} ${data.left_out === 1 ? "is" : "are"} left out` : ""),
    data.path_sentences.map((text) => h("p", {}, text)),
    picks(data),
    compared(data),
    h("p", { class: "legend" }, data.names.map((name) => h("span", { class: "key" }, h("i", { class: `span-${toneOf(name)}` }), name)),
      data.arrows.length ? h("span", { class: "key" }, "\u2192 what the chosen rank waits for, and who waits for it") : null,
      data.path.length ? h("span", { class: "key" }, h("i", { class: "edge" }), "critical path among these ranks") : null),
    canvas, aside,
    h("section", {}, h("h2", {}, "In figures"), table(["rank", "node", "computes", "waits in transfers", "longest span", "clock"], data.rows.map((each) => [
      h("a", { href: place(data, { rank: each.rank }) }, number(each.rank)), h("a", { href: `/nodes/${each.node}` }, each.node), percent(each.computes), percent(each.waits),
      each.longest ? `${each.longest}, ${ms(each.longest_us)}` : "", each.clock]), "the ranks of the timeline")),
  ];
}

// These operations compared with those of an earlier step, the most grown first.
function compared(data) {
  if (!data.beside) return null;
  const { step, operations } = data.beside;
  if (!operations.length || !step) return h("p", { class: "state" }, "There are no spans of the step to compare with.");
  const signed = (value) => `${value < 0 ? "\u2212" : "+"}${ms(1000 * Math.abs(value))}`;
  return h("section", {}, h("h2", {}, `Compared with step ${number(step)}`), table(["operation", "now", "then", "grew by", "most on"], operations.map((each) => [
    each.name, ms(1000 * each.now_ms), ms(1000 * each.then_ms), signed(each.grown_ms),
    h("a", { href: place(data, { rank: each.most_rank }) }, `rank ${number(each.most_rank)}, ${signed(each.most_ms)}`)]), "operations compared with those of the other step"));
}

function whole(data) {
  const [from, to] = extent(data);
  return { from: from - 0.01 * (to - from), to: to + 0.01 * (to - from) };
}

function listen(canvas, data, again) {
  const least = 20;
  const [begin, end] = extent(data);
  const move = (part) => { const by = part * (state.to - state.from); state.from += by; state.to += by; };
  const stretch = (factor, at = (state.from + state.to) / 2) => {
    if ((state.to - state.from) * factor < least || (state.to - state.from) * factor > 1.5 * (end - begin)) return;
    state.from = at - (at - state.from) * factor;
    state.to = at + (state.to - at) * factor;
  };
  const time = (event) => {
    const box = canvas.getBoundingClientRect();
    return state.from + (event.clientX - box.left - GUTTER) / (box.width - GUTTER) * (state.to - state.from);
  };
  canvas.addEventListener("keydown", (event) => {
    const mine = data.spans.row.flatMap((row, at) => row === state.row ? [at] : []);
    const keys = {
      ArrowLeft: () => move(-0.15), ArrowRight: () => move(0.15), "+": () => stretch(0.7), "=": () => stretch(0.7), "-": () => stretch(1.4),
      0: () => Object.assign(state, whole(data)),
      ArrowUp: () => { state.row = Math.max(0, state.row - 1); state.chosen = -1; },
      ArrowDown: () => { state.row = Math.min(data.rows.length - 1, state.row + 1); state.chosen = -1; },
      ",": () => choose(mine, -1), ".": () => choose(mine, 1),
    };
    if (!keys[event.key]) return;
    keys[event.key]();
    event.preventDefault();
    again();
  });
  const choose = (mine, way) => {
    const at = mine.indexOf(state.chosen);
    state.chosen = mine[Math.max(0, Math.min(mine.length - 1, at < 0 ? 0 : at + way))] ?? -1;
    const middle = data.spans.at_us[state.chosen] + data.spans.for_us[state.chosen] / 2;
    if (middle < state.from || middle > state.to) { const half = (state.to - state.from) / 2; state.from = middle - half; state.to = middle + half; }
  };
  canvas.addEventListener("wheel", (event) => {
    if (!event.ctrlKey && !event.shiftKey) return; // the page scrolls
    if (event.ctrlKey) stretch(event.deltaY > 0 ? 1.25 : 0.8, time(event)); else move(Math.sign(event.deltaY || event.deltaX) * 0.1);
    event.preventDefault();
    again();
  }, { passive: false });
  let from = null;
  canvas.addEventListener("pointerdown", (event) => { from = [event.clientX, false]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!from || (!from[1] && Math.abs(event.clientX - from[0]) < 4)) return;
    move((from[0] - event.clientX) / (canvas.clientWidth - GUTTER));
    from = [event.clientX, true];
    again();
  });
  canvas.addEventListener("pointerup", (event) => {
    if (from && !from[1]) { hit(canvas, data, event, time(event)); again(); }
    from = null;
  });
}

function hit(canvas, data, event, at) {
  const y = event.clientY - canvas.getBoundingClientRect().top - HEAD;
  const tall = data.lanes.length * LANE + GAP;
  const row = Math.floor(y / tall);
  if (row < 0 || row >= data.rows.length) return;
  const lane = Math.floor((y - row * tall) / LANE);
  const slack = (state.to - state.from) / canvas.clientWidth * 2;
  const { spans } = data;
  state.row = row;
  state.chosen = spans.row.findIndex((each, index) => each === row && spans.lane[index] === lane
    && spans.at_us[index] - slack <= at && at <= spans.at_us[index] + spans.for_us[index] + slack);
}

function describe(aside, data) {
  const at = state.chosen;
  const row = data.rows[state.row];
  if (at < 0) { aside.textContent = `Rank ${row.rank} on ${row.node}: computes ${percent(row.computes)}, waits in transfers ${percent(row.waits)} of the time.`; return; }
  const { spans } = data;
  const batch = spans.batch[at] < 0 ? "" : `, micro-batch ${spans.batch[at]}`;
  aside.textContent = `Rank ${row.rank} on ${row.node}: ${data.names[spans.name[at]]}, ${ms(spans.for_us[at])}, step ${number(spans.step[at])}${batch}, ${ms(spans.at_us[at] - data.steps[0].at_us)} after the step's begin.`;
}

function paint(canvas, data) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const [ratio, width, height] = [window.devicePixelRatio || 1, canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio);
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  const tall = data.lanes.length * LANE + GAP;
  const x = (us) => GUTTER + (us - state.from) / (state.to - state.from) * (width - GUTTER);
  const [text, quiet, line, back] = ["--text", "--quiet", "--line", "--page"].map(colour);
  pen.font = "11px system-ui"; pen.textBaseline = "middle";
  data.rows.forEach((each, row) => {
    const y = HEAD + row * tall;
    pen.fillStyle = row === state.row ? colour("--tint") : back;
    pen.fillRect(0, y, width, tall - GAP / 2);
    pen.fillStyle = text; pen.font = row === state.row ? "bold 12px system-ui" : "12px system-ui";
    pen.fillText(`rank ${each.rank}  ${each.node}`, 8, y + LANE / 2 + 2);
    pen.fillStyle = quiet; pen.font = "11px system-ui";
    data.lanes.forEach((lane, at) => { if (at) pen.fillText(lane, 20, y + at * LANE + LANE / 2 + 2); });
  });
  pen.save(); pen.beginPath(); pen.rect(GUTTER, 0, width - GUTTER, height); pen.clip();
  ticks(pen, data, x, width, height, [quiet, line, text]);
  const fills = data.names.map((name) => colour(tones[toneOf(name)][1]));
  const { spans } = data;
  for (let at = 0; at < spans.row.length; at += 1) {
    const left = x(spans.at_us[at]);
    const wide = Math.max(0.6, x(spans.at_us[at] + spans.for_us[at]) - left - 0.4);
    if (left > width || left + wide < GUTTER) continue;
    const y = HEAD + spans.row[at] * tall + spans.lane[at] * LANE + 1;
    pen.fillStyle = fills[spans.name[at]];
    pen.globalAlpha = data.lanes[spans.lane[at]] === "compute" || data.lanes[spans.lane[at]] === "host" ? 0.95 : 0.6;
    pen.fillRect(left, y, wide, LANE - 2);
    pen.globalAlpha = 1;
    if (at === state.chosen) { pen.strokeStyle = text; pen.lineWidth = 2; pen.strokeRect(left, y, wide, LANE - 2); }
    if (wide < 12) continue;
    pen.fillStyle = back; pen.font = "10.5px system-ui";
    const name = data.names[spans.name[at]];
    const batch = spans.batch[at] < 0 ? "" : String(spans.batch[at]);
    const fits = [`${name} ${batch}`.trim(), batch].find((each) => pen.measureText(each).width < wide - 6);
    if (fits) pen.fillText(fits, Math.max(left, GUTTER) + 4, y + LANE / 2 - 1);
  }
  pen.fillStyle = colour("--bad");
  for (const [row, at, length] of data.path) {
    const [left, right] = [x(at), x(at + length)];
    if (right >= GUTTER && left <= width) pen.fillRect(left, HEAD + row * tall + data.lanes.length * LANE, Math.max(1, right - left), 3);
  }
  arrows(pen, data, x, tall, text);
  pen.restore();
}

function ticks(pen, data, x, width, height, [quiet, line, text]) {
  const rough = (state.to - state.from) / Math.max(2, (width - GUTTER) / 110);
  const power = 10 ** Math.floor(Math.log10(rough));
  const every = power * (rough / power > 5 ? 10 : rough / power > 2 ? 5 : rough / power > 1 ? 2 : 1);
  const zero = data.steps[0].at_us;
  for (let at = zero + Math.ceil((state.from - zero) / every) * every; at < state.to; at += every) {
    pen.fillStyle = line; pen.fillRect(x(at), HEAD - 6, 1, height);
    pen.fillStyle = quiet; pen.font = "11px system-ui"; pen.fillText(ms(Math.max(0, at - zero)), x(at) + 3, HEAD - 10);
  }
  for (const each of data.steps) {
    pen.fillStyle = text; pen.fillRect(x(each.at_us), 0, 1.5, height);
    pen.font = "bold 11px system-ui"; pen.fillText(`step ${number(each.step)}`, x(each.at_us) + 4, 8);
  }
}

function arrows(pen, data, x, tall, tone) {
  pen.strokeStyle = tone; pen.fillStyle = tone; pen.lineWidth = 1;
  for (const [fromRow, fromUs, toRow, toUs] of data.arrows) {
    if (fromRow !== state.row && toRow !== state.row) continue;
    if (Math.max(fromUs, toUs) < state.from || Math.min(fromUs, toUs) > state.to) continue;
    const [x1, y1, x2, y2] = [x(fromUs), HEAD + fromRow * tall + LANE, x(toUs), HEAD + toRow * tall + LANE];
    pen.globalAlpha = 0.55; pen.beginPath(); pen.moveTo(x1, y1); pen.lineTo(x2, y2); pen.stroke();
    const angle = Math.atan2(y2 - y1, x2 - x1);
    pen.beginPath(); pen.moveTo(x2, y2);
    for (const turn of [2.7, -2.7]) pen.lineTo(x2 + 7 * Math.cos(angle + turn), y2 + 7 * Math.sin(angle + turn));
    pen.fill();
  }
  pen.globalAlpha = 1;
}
