// Line charts (uPlot), histograms and the timeline. Colours come from the style sheet, so both themes are drawn.
import { h, fill, number, compact, duration, percent, known } from "./dom.js";

const uPlot = window.uPlot;
export const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const COLOURS = ["--c0", "--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7"];
export const colour = index => css(COLOURS[index % COLOURS.length]);
const sync = uPlot.sync("jaxroll");

const whenIdle = act => window.requestIdleCallback ? requestIdleCallback(act, { timeout: 500 }) : setTimeout(act, 50);  // Safari has none
const axis = value => known(value) ? compact(value) : "";

// A chart of several curves: [{label, x, y, low, high, dots}]. `set` draws new curves without a new chart if their labels stay,
// and those of a chart outside the window when the browser is idle.
export class Lines {
  constructor({ title, hint, height = 220, x = "step", share = false, onzoom = null }) {
    this.title = title;
    this.x = x;
    this.height = height;
    this.share = share;
    this.onzoom = onzoom;
    this.plot = null;
    this.key = "";
    this.holder = h("div", { class: "plot", style: { minHeight: `${height}px` }, tabindex: "0", role: "img", "aria-label": title });
    this.values = h("div", { class: "values" });
    this.node = h("section", { class: "card chart" }, h("h2", {}, title), hint && h("p", { class: "hint" }, hint),
      this.holder, this.values);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.holder);
    this.holder.addEventListener("keydown", event => this.key_(event));
    this.touch();
  }

  set(curves, x = this.x) {
    this.curves = curves.filter(curve => curve.x.length);
    if (x !== this.x) this.key = "";
    this.x = x;
    this.node.classList.toggle("nothing", !this.curves.length);
    this.late = null;
    this.holder.style.minHeight = this.curves.length ? `${this.height}px` : "";
    if (!this.curves.length) {
      this.destroyPlot();
      fill(this.holder, h("p", { class: "muted empty" }, "no values yet"));
      fill(this.values);
      this.holder.setAttribute("aria-label", `${this.title}: no values yet`);
      return;
    }
    const parts = this.curves.map(curve => {
      const columns = [curve.x, curve.y];
      if (curve.low) columns.push(curve.low, curve.high);
      return columns;
    });
    const joined = parts.length > 1 ? uPlot.join(parts) : parts[0];
    const key = JSON.stringify([this.x, this.curves.map(curve => [curve.label, !!curve.low, curve.colour])]);
    this.late = [key, joined];
    if (this.seen ?? this.look()) this.draw(); else whenIdle(() => this.draw());
    this.seen = null;
    this.describe();
  }

  // Whether the chart is in the window. Looking at several charts before the first is drawn costs one layout.
  look() {
    const place = this.node.getBoundingClientRect();
    this.wide = this.holder.clientWidth;
    return this.seen = place.bottom > 0 && place.top < window.innerHeight;
  }

  draw() {
    if (!this.late) return;
    const [key, joined] = this.late;
    this.late = null;
    if (this.plot && key === this.key) {
      const zoomed = this.zoomed;
      this.plot.setData(joined, !zoomed);
      if (zoomed) this.plot.redraw();
    } else {
      this.key = key;
      this.build(joined);
    }
  }

  build(data) {
    this.destroyPlot();
    fill(this.holder);
    const ink = css("--muted"), grid = css("--grid"), series = [{ label: this.x }], bands = [];
    this.curves.forEach((curve, index) => {
      const stroke = curve.colour ? css(curve.colour) : colour(index);
      const base = { scale: "y", spanGaps: true, stroke, width: 2, label: curve.label,
        points: { show: curve.dots || curve.x.length < 3, size: curve.dots ? 7 : 5, fill: stroke } };
      if (curve.dash) base.dash = [5, 4];
      series.push(base);
      if (curve.low) {
        const edge = { scale: "y", spanGaps: true, stroke: "transparent", width: 0, points: { show: false }, band: true };
        series.push({ ...edge, label: `${curve.label} least` }, { ...edge, label: `${curve.label} largest` });
        bands.push({ series: [series.length - 1, series.length - 2], fill: stroke + "2b" });
      }
    });
    const line = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1, size: 4 },
      font: "12px system-ui, sans-serif" };
    this.plot = new uPlot({
      width: this.width(), height: this.height, series, bands, legend: { show: false },
      cursor: { sync: { key: sync.key, setSeries: false }, points: { size: 7 }, drag: { x: true, y: false, uni: 20 },
        focus: { prox: 30 } },
      scales: { x: { time: false }, y: { range: (u, low, high) => this.range(low, high) } },
      axes: [
        { ...line, size: 30, values: (u, ticks) => ticks.map(t => this.x === "time" ? short(t) : axis(t)), space: 60 },
        { ...line, size: 52, values: (u, ticks) => ticks.map(t => this.share ? `${Number((100 * t).toPrecision(3))} %` : axis(t)) },
      ],
      hooks: { setCursor: [u => this.show(u)], setScale: [(u, scale) => { if (scale === "x") this.rescaled(u); }] },
    }, data, this.holder);
  }

  range(low, high) {
    if (!known(low) || !known(high)) return [0, 1];
    const gap = high - low || Math.abs(high) * 0.1 || 1, air = 0.08 * gap;
    let [from, to] = [low - air, high + air];
    if (low >= 0 && low < 0.4 * high) from = 0;
    if (this.share) [from, to] = [Math.max(0, from), Math.min(1, Math.max(to, from + 0.02))];
    return [from, to];
  }

  rescaled(u) {
    const { min, max } = u.scales.x, xs = u.data[0];
    this.zoomed = min > xs[0] + 1e-9 || max < xs[xs.length - 1] - 1e-9;
    if (this.onzoom && u.cursor.drag && u.select.width > 0) this.onzoom(min, max);
  }

  show(u) {
    const place = u.cursor.idx;
    if (place === null || place === undefined) return this.describe();
    const at = u.data[0][place];
    const items = [];
    let column = 1;
    this.curves.forEach((curve, index) => {
      const near = nearest(curve, at);
      items.push(this.value(curve, index, near === null ? null : curve.y[near], curve.low && near !== null ? [curve.low[near], curve.high[near]] : null));
      column += curve.low ? 3 : 1;
    });
    fill(this.values, h("span", { class: "at" }, this.x === "time" ? short(at) : `step ${number(at)}`), items);
  }

  value(curve, index, y, between) {
    const text = this.share ? percent(y) : number(y);
    return h("span", { class: "one" },
      h("i", { class: "key", style: { background: curve.colour ? css(curve.colour) : colour(index) } }),
      h("bdi", { class: "name" }, curve.label), " ", h("b", {}, text),
      between && h("span", { class: "muted" }, ` (${number(between[0])} to ${number(between[1])})`));
  }

  describe() {
    const last = this.curves.map((curve, index) => this.value(curve, index, curve.y[curve.y.length - 1], null));
    fill(this.values, h("span", { class: "at" }, "latest"), last);
    const words = this.curves.slice(0, 6).map(curve => {
      const low = Math.min(...curve.y), high = Math.max(...curve.y);
      return `${curve.label} from ${number(curve.y[0])} to ${number(curve.y[curve.y.length - 1])}, least ${number(low)}, largest ${number(high)}`;
    });
    this.holder.setAttribute("aria-label", `${this.title}: ${words.join("; ")}. Arrow keys read single values.`);
  }

  key_(event) {
    if (!this.plot) return;
    const xs = this.plot.data[0], move = { ArrowLeft: -1, ArrowRight: 1, PageUp: -20, PageDown: 20 }[event.key];
    if (event.key === "Escape") return this.reset();
    if (!move && event.key !== "Home" && event.key !== "End") return;
    event.preventDefault();
    const from = this.plot.cursor.idx ?? (move > 0 ? -1 : xs.length);
    const place = event.key === "Home" ? 0 : event.key === "End" ? xs.length - 1 : Math.min(Math.max(from + move, 0), xs.length - 1);
    this.plot.setCursor({ left: this.plot.valToPos(xs[place], "x"), top: 20 });
    this.holder.setAttribute("aria-label", this.values.textContent);
  }

  // One finger reads values, two fingers zoom; a vertical move scrolls the page.
  touch() {
    let apart = null;
    this.holder.addEventListener("touchmove", event => {
      if (!this.plot) return;
      const area = this.plot.over.getBoundingClientRect();
      if (event.touches.length === 1) {
        this.plot.setCursor({ left: event.touches[0].clientX - area.left, top: event.touches[0].clientY - area.top });
      } else if (event.touches.length === 2) {
        event.preventDefault();
        const [a, b] = [...event.touches].map(one => this.plot.posToVal(one.clientX - area.left, "x")).sort((p, q) => p - q);
        if (apart && b > a) {
          const { min, max } = this.plot.scales.x, grow = (apart[1] - apart[0]) / (b - a);
          const middle = (apart[0] + apart[1]) / 2, span = (max - min) * grow;
          const low = middle - (middle - min) * grow;
          this.plot.setScale("x", { min: low, max: low + span });
        } else apart = [a, b];
      }
    }, { passive: false });
    this.holder.addEventListener("touchend", () => { apart = null; });
  }

  reset() {
    const xs = this.plot?.data[0];
    if (xs?.length) this.plot.setScale("x", { min: xs[0], max: xs[xs.length - 1] });
  }

  width() { return Math.max(220, Math.floor((this.wide ||= this.holder.clientWidth) || 300)); }

  resize() {
    this.wide = this.holder.clientWidth;
    if (this.plot && this.plot.width !== this.width()) this.plot.setSize({ width: this.width(), height: this.height });
  }

  destroyPlot() {
    this.plot?.destroy();
    this.plot = null;
  }

  destroy() {
    this.observer.disconnect();
    this.late = null;
    this.destroyPlot();
  }
}

function nearest(curve, at) {
  const xs = curve.x;
  let low = 0, high = xs.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (xs[middle] < at) low = middle + 1; else high = middle;
  }
  if (low > 0 && Math.abs(xs[low - 1] - at) < Math.abs(xs[low] - at)) low -= 1;
  return xs.length ? low : null;
}

const short = seconds => {
  const size = Math.abs(seconds);
  if (size < 60) return `${Number(seconds.toPrecision(4))} s`;
  if (size < 3600) return `${Math.floor(seconds / 60)}:${String(Math.floor(seconds % 60)).padStart(2, "0")} min`;
  return `${Math.floor(seconds / 3600)}:${String(Math.floor(seconds / 60 % 60)).padStart(2, "0")} h`;
};

// Bars with their numbers: [[label, value, note, kind]].
export function bars(items, { caption, format = number } = {}) {
  const top = Math.max(1e-12, ...items.map(item => item[1]));
  return h("ol", { class: "bars", "aria-label": caption }, items.map(([label, value, note, kind]) =>
    h("li", { class: kind || null, title: note || null },
      h("span", { class: "label" }, label),
      h("span", { class: "track" }, h("span", { class: "bar", style: { width: `${100 * value / top}%` } })),
      h("span", { class: "amount" }, format(value)))));
}

// --- timeline: one strip per role, drawn from shares of equal parts of the window

const ACTIVITY = { train: "--learner", wait: "--wait", publish: "--publish", decode: "--sampler", fetch: "--both",
  weight_swap: "--publish", prefill: "--sampler-dim", eval: "--evaluator", compile: "--compile", warm: "--warm" };
const NAMES = { weight_swap: "weight swap", eval: "evaluate" };
const activityColour = what => css(ACTIVITY[what] || "--c5");

export class Timeline {
  constructor(onwindow) {
    this.onwindow = onwindow;
    this.lanes = h("div", { class: "lanes", tabindex: "0", role: "group",
      "aria-label": "Timeline. Arrow keys move, plus and minus zoom, 0 shows all." });
    this.legend = h("div", { class: "legend" });
    this.tip = h("p", { class: "tip", role: "status" }, "Point at a lane for its values.");
    this.node = h("div", {}, this.legend, this.lanes, this.tip);
    this.lanes.addEventListener("keydown", event => this.key(event));
    this.observer = new ResizeObserver(() => this.data && this.draw());
    this.observer.observe(this.lanes);
  }

  points() { return Math.min(1200, Math.max(120, Math.floor(this.lanes.clientWidth || 300) - 4)); }

  set(data) {
    this.data = data;
    const kinds = [...new Set(Object.values(data.roles).flatMap(lane => Object.keys(lane)))];
    fill(this.legend, kinds.map(what => h("span", {}, h("i", { class: "key", style: { background: activityColour(what) } }), NAMES[what] || what)),
      Object.keys(data.waits).length ? h("span", {}, h("i", { class: "key", style: { background: css("--bad") } }), "the run waits for it") : null);
    const wanted = [...Object.keys(data.roles).map(role => ["role", role]), ...Object.keys(data.waits).map(name => ["wait", name])];
    if (JSON.stringify(wanted) !== this.wanted) {
      this.wanted = JSON.stringify(wanted);
      this.strips = wanted.map(([kind, name]) => this.strip(kind, name));
      fill(this.lanes, wanted.length ? this.strips.map(strip => strip.row) : h("p", { class: "muted empty" }, "no activity in this time"));
      this.ticks = h("div", { class: "ticks", "aria-hidden": "true" });
      this.lanes.append(this.ticks);
    }
    this.draw();
  }

  strip(kind, name) {
    const canvas = h("canvas", { height: kind === "role" ? 26 : 14 });
    const row = h("div", { class: `lane ${kind}` },
      h("span", { class: "label" }, kind === "wait" ? "waits for " : null, h("bdi", {}, name)), canvas);
    const strip = { kind, name, canvas, row };
    canvas.addEventListener("pointermove", event => this.point(strip, event));
    canvas.addEventListener("pointerdown", event => this.drag(strip, event));
    return strip;
  }

  draw() {
    const { roles, waits, from, to } = this.data, ratio = window.devicePixelRatio || 1;
    for (const { kind, name, canvas } of this.strips) {
      const width = canvas.clientWidth || 300, height = kind === "role" ? 26 : 14;
      canvas.width = Math.round(width * ratio);
      canvas.height = Math.round(height * ratio);
      const paint = canvas.getContext("2d");
      const [wide, high] = [canvas.width, canvas.height];
      paint.fillStyle = css("--lane");
      paint.fillRect(0, 0, wide, high);
      const parts = kind === "role" ? Object.entries(roles[name] || {}) : [["waits", waits[name] || []]];
      const count = Math.max(0, ...parts.map(([, shares]) => shares.length)), step = wide / (count || 1);
      for (let i = 0; i < count; i++) {
        let top = high;
        const left = Math.floor(i * step), right = Math.max(left + 1, Math.floor((i + 1) * step));
        for (const [what, shares] of parts) {
          const size = Math.min(top, Math.round((shares[i] || 0) * high));
          if (size <= 0) continue;
          paint.fillStyle = kind === "role" ? this.colourOf(what) : css("--bad");
          paint.fillRect(left, top - size, right - left, size);
          top -= size;
        }
      }
    }
    const times = [0, 0.25, 0.5, 0.75, 1].map(share => from + share * (to - from));
    const marks = times.map(at => h("span", {}, short(to - from < 20 ? at : Math.round(at))));
    if (this.ticks) fill(this.ticks, marks);
  }

  colourOf(what) {
    this.known ??= new Map();
    if (this.theme !== document.documentElement.dataset.theme) { this.known.clear(); this.theme = document.documentElement.dataset.theme; }
    if (!this.known.has(what)) this.known.set(what, activityColour(what));
    return this.known.get(what);
  }

  share(canvas, event) {
    const area = canvas.getBoundingClientRect();
    return Math.min(0.999999, Math.max(0, (event.clientX - area.left) / area.width));
  }

  point(strip, event) {
    const { roles, waits, reasons, from, to } = this.data, share = this.share(strip.canvas, event);
    const at = from + share * (to - from);
    if (strip.kind === "role") {
      const parts = Object.entries(roles[strip.name] || {}).map(([what, shares]) => [what, shares[Math.floor(share * shares.length)] || 0]);
      const busy = parts.filter(([, value]) => value > 0.004).map(([what, value]) => `${NAMES[what] || what} ${percent(value, 0)}`);
      fill(this.tip, h("b", {}, strip.name), ` at ${duration(at)}: `, busy.join(", ") || "no report");
      return;
    }
    const place = Math.floor(share * reasons.length);
    const reason = reasons.slice(Math.max(0, place - 3), place + 4).filter(Boolean).map(one => one[strip.name]).filter(Boolean).pop();
    const value = (waits[strip.name] || [])[Math.floor(share * (waits[strip.name] || []).length)] || 0;
    fill(this.tip, `at ${duration(at)} the run waits for `, h("b", {}, h("bdi", {}, strip.name)), ` ${percent(value, 0)} of the time`,
      reason ? [": it ", h("bdi", {}, reason)] : null);
  }

  drag(strip, event) {
    if (event.pointerType === "touch") return;
    const start = this.share(strip.canvas, event), { from, to } = this.data;
    strip.canvas.setPointerCapture(event.pointerId);
    strip.canvas.onpointerup = next => {
      strip.canvas.onpointerup = null;
      const end = this.share(strip.canvas, next), [a, b] = [Math.min(start, end), Math.max(start, end)];
      if (b - a > 0.01) this.onwindow(from + a * (to - from), from + b * (to - from));
    };
  }

  key(event) {
    const { from, to, all } = this.data || {}, span = to - from;
    const moves = { ArrowLeft: [-0.25, -0.25], ArrowRight: [0.25, 0.25], "+": [0.2, -0.2], "=": [0.2, -0.2], "-": [-0.34, 0.34] }[event.key];
    if (event.key === "0") { event.preventDefault(); return this.onwindow(null, null); }
    if (!moves || !known(span)) return;
    event.preventDefault();
    this.onwindow(Math.max(0, from + moves[0] * span), Math.min(all, to + moves[1] * span));
  }

  destroy() { this.observer.disconnect(); }
}
