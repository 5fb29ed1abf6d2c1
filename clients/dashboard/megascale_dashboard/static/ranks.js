// The ranks of a job as a block of tensor x data x pipeline, drawn on a canvas, turned by mouse or
// arrow keys; a table has the same ranks for readers who do not see it.
import { chip, counted, h, number, sign, span, table } from "./dom.js";

const turned = { yaw: -0.62, pitch: 0.5, selected: 0 };
const axisColours = { tp: "--axis-tp", dp: "--axis-dp", pp: "--axis-pp" };
const stateColours = { lost: "--bad", culprit: "--bad", silent: "--warn", waiting: "--warn", training: "--good", absent: "--quiet" };
const meaning = { tp: "tensor: splits each layer", dp: "data: splits the batch", pp: "pipeline: activations go to the next stage" };

const place = (rank, axes) => {
  const tp = rank % axes.tp;
  const dp = Math.floor(rank / (axes.tp * axes.cp)) % axes.dp;
  return { tp, dp, pp: Math.floor(rank / (axes.tp * axes.cp * axes.dp)) };
};
const lineOf = (rank, axis, data) => {
  const stride = data.strides[axis];
  if (!stride) return [rank];
  const first = rank - place(rank, data.axes)[axis] * stride;
  return Array.from({ length: data.axes[axis] }, (_, at) => first + at * stride);
};

export function block(data) {
  const given = Number(new URLSearchParams(location.search).get("rank"));
  turned.selected = Number.isInteger(given) && given >= 0 && given < data.world ? given : 0;
  const canvas = h("canvas", { tabindex: "0", role: "img", "aria-label":
    `${counted(data.world, "rank")}: tensor ${data.axes.tp}, data ${data.axes.dp}, pipeline ${data.axes.pp}; arrows turn it, comma and full stop select a rank` });
  const aside = h("aside", { class: "rank", "aria-live": "polite" });
  const counts = {};
  data.state.forEach((word) => { counts[word] = (counts[word] || 0) + 1; });
  const select = (rank) => {
    turned.selected = rank;
    const url = new URL(location.href);
    url.searchParams.set("rank", rank);
    history.replaceState(null, "", url);
    describe(aside, data, select);
    paint(canvas, data);
  };
  canvas.addEventListener("keydown", (event) => {
    const turn = { ArrowLeft: [-0.12, 0], ArrowRight: [0.12, 0], ArrowUp: [0, -0.12], ArrowDown: [0, 0.12] }[event.key];
    if (turn) { turned.yaw += turn[0]; turned.pitch += turn[1]; paint(canvas, data); }
    else if (event.key === "." || event.key === ",") select((turned.selected + (event.key === "." ? 1 : data.world - 1)) % data.world);
    else return;
    event.preventDefault();
  });
  let from = null;
  canvas.addEventListener("pointerdown", (event) => { from = [event.clientX, event.clientY, false]; canvas.setPointerCapture(event.pointerId); });
  canvas.addEventListener("pointermove", (event) => {
    if (!from) return;
    const [dx, dy] = [event.clientX - from[0], event.clientY - from[1]];
    if (!from[2] && Math.hypot(dx, dy) < 4) return;
    turned.yaw += dx / 200; turned.pitch += dy / 200;
    from = [event.clientX, event.clientY, true];
    paint(canvas, data);
  });
  canvas.addEventListener("pointerup", (event) => {
    if (from && !from[2]) { const rank = nearest(canvas, data, event); if (rank >= 0) select(rank); }
    from = null;
  });
  // It also reports the first size, so a canvas that gets its place is painted once.
  new ResizeObserver(() => canvas.isConnected && paint(canvas, data)).observe(canvas);
  describe(aside, data, select);
  return [
    h("h1", {}, "Ranks of ", h("a", { href: `/jobs/${data.name}` }, data.name), " ", chip(data.phase)),
    h("p", { class: "under" }, data.phase_reason),
    data.standstill ? h("p", { class: "problem" }, data.standstill) : null,
    data.edges.length ? h("p", { class: "legend" }, h("span", { class: "key" }, h("i", { class: "edge" }), "a rank waits for another (all edges of the selected rank, some of the others)")) : null,
    h("p", { class: "legend" }, Object.entries(counts).map(([word, count]) => chip(word, ` ${number(count)}`)),
      ["tp", "dp", "pp"].map((axis) => h("span", { class: "key" }, h("i", { class: `axis-${axis}` }), `${axis} ${data.axes[axis]}, ${meaning[axis]}`))),
    h("div", { class: "block" }, canvas, aside),
    data.behind.length ? h("section", {}, h("h2", {}, "How far they got"), table(["rank", "node", "phase", "step", "silent for", "entered / completed in each group", "in words"], data.behind.map((each) => [
      h("b", {}, number(each.rank), each.holds_up ? " holds the others up" : ""), h("a", { href: `/nodes/${each.node}` }, each.node), each.phase, number(each.step), span(each.silent_s),
      each.operations.map((one) => h("span", { class: one.lags ? "lag" : "" }, `${one.group} ${number(one.entered)} / ${number(one.completed)}${one.lags ? " behind" : ""} `)), each.waits]), "ranks of the standstill")) : null,
  ];
}

function describe(aside, data, select) {
  const rank = turned.selected;
  const at = place(rank, data.axes);
  const node = data.names[data.node[rank]];
  const pick = h("input", { id: "filter", type: "number", min: 0, max: data.world - 1, value: rank,
    onchange: () => { const wanted = Number(pick.value); if (wanted >= 0 && wanted < data.world) select(wanted); } });
  const members = (axis) => {
    const line = lineOf(rank, axis, data);
    const shown = line.length > 16 ? [...line.slice(0, 15), "..."] : line;
    return shown.map((each) => each === rank ? h("b", {}, `${each} `) : `${each} `);
  };
  aside.replaceChildren(
    h("h2", {}, `Rank ${rank}`), h("p", {}, h("label", { for: "filter" }, "Rank "), pick),
    h("p", {}, chip(data.state[rank]), node ? [" on ", h("a", { href: `/nodes/${node}` }, node)] : " on no node"),
    data.waits[rank] ? h("p", {}, data.waits[rank]) : "",
    h("dl", {}, ["tp", "dp", "pp"].map((axis) => [h("dt", { class: `axis-text-${axis}` }, `${axis} ${at[axis]} of ${data.axes[axis]}`), h("dd", {}, members(axis))])),
    h("p", {}, "Its log:"), h("code", {}, `megascale logs ${data.name} --rank ${rank}`));
}

// Centres of all ranks on the canvas, as [x, y, depth], and pixels for one unit of length.
function centres(canvas, data) {
  const { tp, dp, pp } = data.axes;
  const spread = { tp: Math.max(2.2, tp), dp: Math.max(2.2, Math.min(dp, 26)), pp: Math.max(2.2, pp * 1.6) };
  const reach = Math.hypot(spread.tp, spread.dp, spread.pp);
  const scale = Math.min(canvas.clientWidth, canvas.clientHeight * 1.35) / reach * 0.86;
  const [cy, sy, cx, sx] = [Math.cos(turned.yaw), Math.sin(turned.yaw), Math.cos(turned.pitch), Math.sin(turned.pitch)];
  // Along an axis the places repeat: each is turned once, and a rank is the sum of its three.
  const along = (axis, size, turn) => Array.from({ length: size }, (_, at) => turn(size > 1 ? (at / (size - 1) - 0.5) * (spread[axis] - 1) : 0));
  const x = along("pp", pp, (v) => [v * cy, v * sy * sx, -v * sy * cx]);
  const y = along("tp", tp, (v) => [0, v * cx, v * sx]);
  const z = along("dp", dp, (v) => [v * sy, -v * cy * sx, v * cy * cx]);
  const [midX, midY] = [canvas.clientWidth / 2, canvas.clientHeight / 2];
  const spots = new Array(data.world);
  for (let rank = 0; rank < data.world; rank += 1) {
    const group = Math.floor(rank / (tp * data.axes.cp));
    const [a, b, c] = [x[Math.floor(group / dp)], y[rank % tp], z[group % dp]];
    spots[rank] = [midX + (a[0] + b[0] + c[0]) * scale, midY + (a[1] + b[1] + c[1]) * scale, a[2] + b[2] + c[2]];
  }
  return { spots, scale };
}

function nearest(canvas, data, event) {
  const box = canvas.getBoundingClientRect();
  let [found, best] = [-1, 14];
  centres(canvas, data).spots.forEach(([x, y], rank) => {
    const far = Math.hypot(x - (event.clientX - box.left), y - (event.clientY - box.top));
    if (far <= best) [found, best] = [rank, far];
  });
  return found;
}

function paint(canvas, data) {
  const style = getComputedStyle(document.documentElement);
  const colour = (name) => style.getPropertyValue(name).trim();
  const ratio = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  if (!width) return;
  if (canvas.width !== Math.round(width * ratio)) { canvas.width = Math.round(width * ratio); canvas.height = Math.round(height * ratio); }
  const pen = canvas.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  const { spots, scale } = centres(canvas, data);
  const side = Math.max(2, Math.min(17, 0.62 * scale * Math.min(1, 26 / data.axes.dp)));
  const lines = Object.fromEntries(["tp", "dp", "pp"].map((axis) => [axis, lineOf(turned.selected, axis, data)]));
  const chosen = new Set(Object.values(lines).flat());
  const fills = Object.fromEntries(Object.entries(stateColours).map(([word, name]) => [word, colour(name)]));
  const order = spots.map((_, rank) => rank).sort((a, b) => spots[b][2] - spots[a][2]);
  for (const rank of order) {
    const [x, y] = spots[rank];
    const word = data.state[rank];
    const loud = word === "lost" || word === "culprit" || word === "silent" || chosen.has(rank);
    pen.globalAlpha = loud ? 1 : data.standstill && word === "waiting" ? 0.9 : 0.34;
    pen.fillStyle = fills[word];
    const size = word === "lost" || word === "culprit" ? Math.max(5, side * 1.35) : word === "silent" ? Math.max(4, side) : side;
    pen.fillRect(x - size / 2, y - size / 2, size, size);
    if (size > 8 && (word === "lost" || word === "culprit" || word === "silent")) {
      pen.fillStyle = colour("--page"); pen.font = `bold ${Math.max(8, size * 0.8)}px system-ui`; pen.textAlign = "center"; pen.textBaseline = "middle";
      pen.fillText(sign(word), x, y + 0.5);
    }
  }
  pen.globalAlpha = 1;
  for (const axis of ["tp", "dp", "pp"]) {
    if (lines[axis].length < 2) continue;
    pen.strokeStyle = colour(axisColours[axis]); pen.lineWidth = 2.5; pen.beginPath();
    lines[axis].forEach((rank, at) => at ? pen.lineTo(spots[rank][0], spots[rank][1]) : pen.moveTo(spots[rank][0], spots[rank][1]));
    pen.stroke();
    if (axis === "pp") arrow(pen, spots[lines.pp[lines.pp.length - 2]], spots[lines.pp[lines.pp.length - 1]]);
    const end = spots[lines[axis][lines[axis].length - 1]];
    pen.fillStyle = colour(axisColours[axis]); pen.font = "bold 13px system-ui"; pen.textAlign = "left";
    pen.fillText(axis, end[0] + side, end[1] - side);
  }
  edges(pen, data, spots, colour("--bad"));
  const [x, y] = spots[turned.selected];
  pen.strokeStyle = colour("--text"); pen.lineWidth = 2; pen.strokeRect(x - side / 2 - 3, y - side / 2 - 3, side + 6, side + 6);
}

// Who waits for whom: all pairs of the selected rank, and a thin veil of the others.
function edges(pen, data, spots, tone) {
  pen.strokeStyle = tone;
  const every = Math.max(1, Math.ceil(data.edges.length / 120));
  data.edges.forEach(([waits, awaited], at) => {
    const mine = waits === turned.selected || awaited === turned.selected;
    if (at % every && waits !== turned.selected) return;
    pen.globalAlpha = waits === turned.selected ? 1 : mine ? 0.3 : 0.14; pen.lineWidth = waits === turned.selected ? 2 : 1;
    // Bent, so that those along one line of ranks stay apart from it.
    const [[x1, y1], [x2, y2]] = [spots[waits], spots[awaited]];
    const [cx, cy] = [(x1 + x2) / 2 + 0.22 * (y2 - y1), (y1 + y2) / 2 - 0.22 * (x2 - x1)];
    pen.beginPath(); pen.moveTo(x1, y1); pen.quadraticCurveTo(cx, cy, x2, y2); pen.stroke();
    if (waits === turned.selected) arrow(pen, [cx, cy], [x2, y2]);
  });
  pen.globalAlpha = 1;
}

function arrow(pen, from, to) {
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
  pen.beginPath();
  for (const turn of [2.6, -2.6]) { pen.moveTo(to[0], to[1]); pen.lineTo(to[0] + 12 * Math.cos(angle + turn), to[1] + 12 * Math.sin(angle + turn)); }
  pen.stroke();
}
