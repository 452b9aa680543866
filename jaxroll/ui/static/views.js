// The views of the dashboard, except the rollouts. A view has `refresh` (false: refresh less often) and may have `move`, `repaint`, `destroy`.
import { h, fill, api, post, card, chip, table, empty, foreign, number, percent, duration, ago, moment, clock, compact, known } from "./dom.js";
import { Lines, Timeline, bars } from "./charts.js";

const STATE_TEXT = { live: "live", finished: "finished", stopped: "stopped" };
const figure = (value, text, kind) => h("div", { class: `figure ${kind || ""}` }, h("b", {}, value), h("span", {}, text));

// --- the list of runs

export class RunList {
  constructor({ main, link }) {
    this.link = link;
    this.chosen = new Set();
    this.node = h("div", {});
    this.compare = h("a", { class: "button", hidden: true }, "Compare");
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Runs"), this.compare), this.node);
  }

  async refresh() {
    const { folder, runs } = await api("runs");
    if (!runs.length) { fill(this.node, empty(`No runs in ${folder}.`)); return; }
    const focused = document.activeElement?.dataset?.run;
    const rows = runs.map(run => {
      const box = h("input", { type: "checkbox", "data-run": run.name, checked: this.chosen.has(run.name), "aria-label": `compare ${run.name}`,
        onchange: event => { event.target.checked ? this.chosen.add(run.name) : this.chosen.delete(run.name); this.offer(); } });
      if (run.error) return [box, foreign(run.name), chip("damaged", "bad"), foreign(run.error), "", "", ""];
      return [box, h("a", { href: this.link(run.name), class: "strong" }, h("bdi", {}, run.name)),
        [chip(STATE_TEXT[run.state], run.state), run.simulated ? chip("simulated", "muted") : null],
        h("span", { class: "progress" }, h("span", { class: "track" }, h("span", { class: "bar", style: { width: `${Math.min(100, 100 * run.trained / run.steps)}%` } })), `${number(run.trained)} / ${number(run.steps)}`),
        number(run.reward), percent(run.accuracy), moment(run.created)];
    });
    fill(this.node, table(["", "run", "state", "steps", "reward", "held-out", "created"], rows, { caption: "Runs", right: [4, 5] }));
    if (focused) [...this.node.querySelectorAll("input")].find(box => box.dataset.run === focused)?.focus();
    this.offer();
  }

  offer() {
    const [first, ...others] = [...this.chosen];
    this.compare.hidden = !others.length;
    if (others.length) {
      this.compare.href = this.link(first, "curves", others.join("\n"));
      this.compare.textContent = `Compare ${this.chosen.size} runs`;
    }
  }
}

// --- overview

export class Overview {
  constructor({ run, main, live, link, toast }) {
    Object.assign(this, { run, live, link, toast });
    this.controls = new Controls(this);
    this.figures = h("div", { class: "card flush figures" });
    this.waits = h("div", {});
    this.learning = new Lines({ title: "Reward and held-out accuracy", share: false });
    this.rate = new Lines({ title: "Decoded tokens per second" });
    this.ages = h("div", {});
    this.events = h("div", {});
    this.examples = h("div", {});
    this.head = h("div", { class: "bar" });
    fill(main, this.head, this.controls.node, this.figures, this.waits, h("div", { class: "two" }, this.learning.node, this.rate.node),
      h("div", { class: "two" }, card("Age of the trained tokens", "Versions between sampling and training of each token, all steps.", this.ages),
        card("Latest events", null, this.events)), this.examples);
  }

  async refresh() {
    const names = ["step/reward_mean", "eval/accuracy", "stats/tokens_per_s"];
    const [found, drawn, ages, faults] = await Promise.all([
      api("run", { run: this.run }), api("curves", { run: this.run, name: names, points: 300 }),
      api("ages", { run: this.run }), api("faults", { run: this.run })]);
    this.live(found.state);
    const step = Object.entries(found.latest).find(([key]) => key.endsWith("/step"))?.[1] || {};
    const store = Object.entries(found.latest).find(([key]) => key.endsWith("/store"))?.[1] || {};
    const score = found.eval[0] || {}, rates = drawn.curves["stats/tokens_per_s"];
    fill(this.head, h("h1", {}, foreign(this.run)), chip(STATE_TEXT[found.state], found.state),
      found.about.simulated ? chip("simulated", "muted") : null,
      h("span", { class: "muted" }, found.closed && found.closed !== "finished" ? foreign(found.closed) : `created ${moment(found.about.created)}`),
      found.ready ? null : h("span", { class: "muted" }, `reading metrics: ${number(found.rows)} rows`));
    this.controls.set(found.state === "live", store.paused === true);
    fill(this.figures,
      figure(`${number(found.trained)} / ${number(found.steps)}`, "steps trained"),
      figure(number(step.reward_mean), "mean reward of the last step"),
      figure(percent(score.accuracy), known(score.step) ? `held-out accuracy at step ${number(score.step)}` : "held-out accuracy"),
      figure(compact(rates.reduce((sum, one) => sum + (one.y[one.y.length - 1] || 0), 0)), "decoded tokens per second, last report"),
      figure(`${number(step.age_mean)} / ${number(step.age_max)}`, `age of trained tokens, mean / largest; bound ${ages.bound}`, step.age_max > ages.bound ? "bad" : ""),
      figure(percent(store.learner_wait_share, 0), "of its time the learner waits for groups"),
      figure(known(store.groups_in_flight) ? `${number(store.groups_in_flight)} of ${number(store.in_flight_window)}` : number(null), "groups in flight, of the window"),
      figure(percent(store.wasted_tokens), "of the sampled tokens are not trained"));
    const waits = found.state === "live" ? Object.entries(store.waits || {}) : [];
    fill(this.waits, waits.length ? card("The run waits for", null, h("ul", { class: "plain" }, waits.map(([who, why]) => h("li", {}, h("b", {}, foreign(who)), " ", foreign(why))))) : null);
    const accuracy = drawn.curves["eval/accuracy"].map(one => ({ ...one, label: "held-out accuracy", colour: "--evaluator", dots: true }));
    const reward = drawn.curves["step/reward_mean"].map(one => ({ ...one, label: "reward", colour: "--learner" }));
    this.learning.set([...reward, ...accuracy]);
    this.rate.set(rates.map(one => ({ ...one, label: one.role })));
    fill(this.ages, ageBars(ages));
    fill(this.events, eventList(faults.events.slice(0, 8)));
    fill(this.examples, score.examples?.length ? card("Held-out answers", `At step ${number(score.step)}.`, table(["question", "expected", "answer", ""],
      score.examples.slice(0, 8).map(one => [foreign(one.prompt, { class: "clamp" }), foreign(one.answer), foreign(one.text, { class: "clamp" }), chip(one.ok ? "right" : "wrong", one.ok ? "good" : "bad")]),
      { caption: "Held-out answers" })) : null);
    return found.state === "live" || !found.ready;
  }

  repaint() { for (const chart of [this.learning, this.rate]) { chart.key = ""; if (chart.curves) chart.set(chart.curves); } }
  destroy() { this.learning.destroy(); this.rate.destroy(); }
}

// Pause, resume, checkpoint, stop. Stop asks again before it acts.
class Controls {
  constructor({ run, toast }) {
    Object.assign(this, { run, toast });
    const button = (text, action, kind) => h("button", { type: "button", class: kind || null, onclick: () => this.act(action) }, text);
    this.pause = button("Pause", "pause");
    this.resume = button("Resume", "resume", "primary");
    this.checkpoint = button("Checkpoint now", "checkpoint");
    this.stop = h("button", { type: "button", class: "danger", onclick: () => this.ask() }, "Stop …");
    this.state = h("span", { class: "chip warn" }, "paused");
    this.node = h("div", { class: "bar controls", role: "group", "aria-label": "Control of the run", hidden: true }, this.state, this.pause, this.resume, this.checkpoint, this.stop);
  }

  set(live, paused) {
    this.node.hidden = !live;
    this.pause.hidden = paused;
    this.resume.hidden = this.state.hidden = !paused;
  }

  ask() {
    if (this.asked) { this.asked = false; this.stop.textContent = "Stop …"; this.act("stop"); return; }
    this.asked = true;
    this.stop.textContent = "Really stop the run?";
    setTimeout(() => { this.asked = false; this.stop.textContent = "Stop …"; }, 6000);
  }

  async act(action) {
    try { this.toast((await post("/api/control", { run: this.run, action })).text); } catch (error) { this.toast(error.message); }
  }
}

function ageBars({ ages, bound, alpha }) {
  const total = Object.values(ages).reduce((sum, count) => sum + count, 0);
  if (!total) return empty("no trained tokens yet");
  const oldest = Math.max(bound, ...Object.keys(ages).map(Number));
  const items = Array.from({ length: oldest + 1 }, (_, age) => [`age ${age}`, (ages[age] || 0) / total,
    `${number(ages[age] || 0)} tokens`, age > bound ? "bad" : ""]);
  return [bars(items.slice(0, 60), { caption: "Share of the trained tokens by age", format: percent }),
    h("p", { class: "hint" }, `The bound is ${bound} (α = ${alpha}).`)];
}

function eventList(events) {
  if (!events.length) return empty("no events");
  return h("ul", { class: "events" }, events.map(event => h("li", { class: event.kind },
    h("time", {}, clock(event.t)), h("b", {}, foreign(event.kind === "restart" ? event.process : event.role)),
    foreign(event.kind === "restart" ? `died (${event.code < 0 ? `signal ${-event.code}` : `exit code ${event.code}`}) and starts again` : event.text))));
}

// --- curves

const SHOWN = ["step/reward_mean", "eval/accuracy", "step/loss", "step/entropy", "step/grad_norm", "step/age_mean",
  "step/wait_s", "step/train_s", "stats/tokens_per_s", "store/learner_wait_share", "step/kl_behaviour", "step/ess",
  "step/clip_share", "store/in_flight_window", "stats/slot_occupancy", "step/padding_waste"];
const FIRST = 9;  // charts of SHOWN that a window shows at first: they are asked for before the run's names are known
const SHARES = new Set(["eval/accuracy", "store/learner_wait_share", "stats/slot_occupancy", "step/padding_waste", "store/wasted_tokens", "step/clip_share"]);

export class Curves {
  constructor({ run, main, live, link }) {
    Object.assign(this, { run, live, link, others: [], x: "step", window: [null, null] });
    this.charts = new Map();
    this.extra = new Set();
    this.runs = h("details", { class: "choose" });
    this.axis = h("select", { "aria-label": "horizontal axis", onchange: event => { this.x = event.target.value; this.window = [null, null]; this.refresh(); } },
      h("option", { value: "step" }, "by step"), h("option", { value: "time" }, "by time"));
    this.search = h("input", { type: "search", list: "metric-names", placeholder: "add a metric", "aria-label": "add a metric",
      onchange: event => { if (this.names?.includes(event.target.value)) { this.extra.add(event.target.value); event.target.value = ""; this.refresh(); } } });
    this.options = h("datalist", { id: "metric-names" });
    this.grid = h("div", { class: "grid" });
    this.whole = h("button", { type: "button", hidden: true, onclick: () => { this.window = [null, null]; this.refresh(true); } }, "Show all");
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Curves"), this.axis, this.search, this.options, this.whole, this.runs), this.grid);
  }

  move(rest) { this.others = rest.length ? rest[0].split("\n").filter(Boolean) : this.others; }

  async refresh(force) {
    const [from, to] = this.window, asked = this.wanted ?? SHOWN.slice(0, FIRST);
    const curves = names => api("curves", { run: [this.run, ...this.others], name: names, x: this.x, points: 400, from, to });
    const [found, { runs }, first] = await Promise.all([api("run", { run: this.run }), api("runs"), curves(asked)]);
    this.live(found.state);
    this.choose(runs);
    if (JSON.stringify(found.names) !== JSON.stringify(this.names)) {
      this.names = found.names;
      fill(this.options, found.names.map(name => h("option", { value: name })));
    }
    const wanted = [...this.extra, ...SHOWN.filter(name => found.names.includes(name) && !this.extra.has(name))];
    for (const [name, chart] of this.charts) if (!wanted.includes(name)) { chart.destroy(); chart.node.remove(); this.charts.delete(name); }
    for (const name of wanted) {
      if (this.charts.has(name)) continue;
      const chart = new Lines({ title: name, height: 190, x: this.x, share: SHARES.has(name), onzoom: (a, b) => { this.window = [a, b]; this.refresh(true); } });
      this.charts.set(name, chart);
      this.extra.has(name) ? this.grid.prepend(chart.node) : this.grid.append(chart.node);
    }
    if (!wanted.length) { fill(this.grid, empty("no metrics yet")); return true; }
    this.whole.hidden = from === null;
    for (const chart of this.charts.values()) chart.look();
    this.draw(asked, first, force);
    const others = wanted.filter(name => !asked.includes(name));
    if (others.length) this.draw(others, await curves(others), force);
    this.wanted = wanted;
    return found.state === "live" || !first.ready;
  }

  draw(names, found, force) {
    const several = this.others.length > 0;
    for (const name of names) {
      const chart = this.charts.get(name);
      if (!chart) continue;
      if (force) chart.key = "";
      chart.set((found.curves[name] || []).map(one => ({ ...one, label: several ? `${one.run} · ${one.role}` : one.role, dots: name === "eval/accuracy" })), this.x);
    }
  }

  choose(runs) {
    const names = runs.filter(run => !run.error && run.name !== this.run).map(run => run.name);
    const key = JSON.stringify([names, this.others]);
    if (key === this.key) return;
    this.key = key;
    fill(this.runs, h("summary", {}, this.others.length ? `Overlay: ${this.others.length} more` : "Overlay runs"),
      h("div", { class: "menu" }, names.length ? names.map(name => h("label", {}, h("input", { type: "checkbox", checked: this.others.includes(name),
        onchange: event => { this.others = event.target.checked ? [...this.others, name] : this.others.filter(one => one !== name); this.refresh(true); } }), h("bdi", {}, name))) : empty("no other runs")));
  }

  repaint() { for (const chart of this.charts.values()) { chart.key = ""; if (chart.curves) chart.set(chart.curves); } }
  destroy() { for (const chart of this.charts.values()) chart.destroy(); }
}

// --- timeline

export class TimelineView {
  constructor({ run, main, live }) {
    Object.assign(this, { run, live, follow: "all", window: [null, null] });
    this.timeline = new Timeline((from, to) => { this.window = [from, to]; if (from === null) this.follow = "all"; else this.follow = ""; this.choice.value = this.follow; this.refresh(); });
    this.choice = h("select", { "aria-label": "time shown", onchange: event => { this.follow = event.target.value; this.window = [null, null]; this.refresh(); } },
      h("option", { value: "all" }, "all"), h("option", { value: "60" }, "last minute"), h("option", { value: "300" }, "last 5 minutes"),
      h("option", { value: "3600" }, "last hour"), h("option", { value: "" }, "selected part"));
    const zoom = (text, label, keys) => h("button", { type: "button", "aria-label": label, onclick: () => this.timeline.key({ key: keys, preventDefault() {} }) }, text);
    this.note = h("span", { class: "muted" });
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Timeline"), this.choice, h("span", { class: "buttons" },
      zoom("←", "earlier", "ArrowLeft"), zoom("→", "later", "ArrowRight"), zoom("+", "zoom in", "+"), zoom("−", "zoom out", "-"), zoom("all", "show all", "0")), this.note),
    card("Activity of the processes, and what the run waits for", "Height is the share of each part of the time. Drag over a lane to look at a part.", this.timeline.node));
  }

  async refresh() {
    let [from, to] = this.window;
    if (+this.follow > 0) { from = this.all ? Math.max(0, this.all - this.follow) : null; to = null; }
    const found = await api("timeline", { run: this.run, from, to, points: this.timeline.points() });
    const first = this.all === undefined;
    this.all = found.all;
    this.timeline.set(found);
    this.note.textContent = `${duration(found.from)} to ${duration(found.to)} of ${duration(found.all)}, from ${moment(found.first_t)}`;
    if (first && +this.follow > 0) return this.refresh();
    const { state } = await api("run", { run: this.run });
    this.live(state);
    return state === "live" || !found.ready;
  }

  repaint() { this.timeline.known = null; if (this.timeline.data) this.timeline.set(this.timeline.data); }
  destroy() { this.timeline.destroy(); }
}

// --- weights and ages

export class Weights {
  constructor({ run, main, live }) {
    Object.assign(this, { run, live });
    this.lag = new Lines({ title: "Published version, and the version that each sampler has", x: "time" });
    this.gap = new Lines({ title: "Seconds between two published versions" });
    this.age = new Lines({ title: "Age of the trained tokens by step" });
    this.last = h("select", { "aria-label": "steps counted", onchange: () => this.refresh() },
      h("option", { value: "" }, "all steps"), h("option", { value: "10" }, "last 10 steps"), h("option", { value: "100" }, "last 100 steps"));
    this.ages = h("div", {});
    this.table = h("div", {});
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Weights and ages")),
      h("div", { class: "two" }, card("Trained tokens by age", "Age: versions between sampling and training (staleness).", this.last, this.ages), this.age.node),
      h("div", { class: "two" }, this.lag.node, this.gap.node), this.table);
  }

  async refresh() {
    const [run, ages, versions, drawn, byTime] = await Promise.all([api("run", { run: this.run }), api("ages", { run: this.run, last: this.last.value }),
      api("versions", { run: this.run }), api("curves", { run: this.run, name: ["step/age_mean", "step/age_max"], points: 300 }),
      api("curves", { run: this.run, name: "stats/weights_step", x: "time", points: 300 })]);
    this.live(run.state);
    fill(this.ages, ageBars(ages));
    this.age.set([...drawn.curves["step/age_mean"].map(one => ({ ...one, label: "mean", colour: "--learner" })),
      ...drawn.curves["step/age_max"].map(one => ({ ...one, label: "largest", colour: "--publish" }))]);
    const list = versions.versions, start = run.first_t || list[0]?.unix_s || 0;
    this.lag.set([{ label: "published", x: list.map(one => one.unix_s - start), y: list.map(one => one.step), colour: "--learner" },
      ...byTime.curves["stats/weights_step"].map((one, i) => ({ ...one, label: one.role, colour: ["--sampler", "--publish", "--both", "--evaluator"][i % 4], dash: true }))], "time");
    this.gap.set([{ label: "seconds", x: list.slice(1).map(one => one.step), y: list.slice(1).map((one, i) => one.unix_s - list[i].unix_s), colour: "--publish" }]);
    fill(this.table, card("Newest versions", null, table(["version", "published", "age", "channel"],
      list.slice(-12).reverse().map(one => [`${one.lineage}.${one.step}`, moment(one.unix_s), ago(one.unix_s), foreign(one.channel)]), { caption: "Newest versions" })));
    return run.state === "live" || !run.ready;
  }

  repaint() { for (const chart of [this.lag, this.gap, this.age]) { chart.key = ""; if (chart.curves) chart.set(chart.curves); } }
  destroy() { for (const chart of [this.lag, this.gap, this.age]) chart.destroy(); }
}

// --- faults

export class Faults {
  constructor({ run, main, live, link }) {
    Object.assign(this, { run, live, link });
    this.node = h("div", {});
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Faults and restarts")), this.node);
  }

  async refresh() {
    const [f, run] = await Promise.all([api("faults", { run: this.run }), api("run", { run: this.run })]);
    this.live(run.state);
    const restarts = Object.entries(f.restarts), group = id => h("a", { href: this.link(this.run, "rollouts", id) }, `group ${id}`);
    fill(this.node,
      h("div", { class: "two" },
        card("Restarts", "Processes that died and were started again by the supervisor.", restarts.length ? bars(restarts.map(([name, count]) => [foreign(name), count, "", "bad"]), { caption: "Restarts by process" }) : empty("none")),
        card("Groups that ended untrained", "By reason.", f.ended?.length ? bars(f.ended.map(one => [foreign(one.reason || one.state.toLowerCase()), one.groups, one.state, one.state === "DEAD" ? "bad" : ""]), { caption: "Groups that ended untrained" }) : empty("none"))),
      card("Causes of failures", "Of the newest 5,000 failures; errors that differ in numbers only are one cause.", f.causes?.length ? table(["cause", "kind", "failures", "groups", "last"],
        f.causes.map(one => [foreign(one.cause, { class: "clamp" }), chip(one.kind, one.kind === "DATA" ? "bad" : "muted"), number(one.failures), number(one.groups), `${duration(one.ago_s)} ago`]), { caption: "Causes of failures", right: [2, 3] }) : empty("no failures")),
      f.failures?.length ? card("Newest failures", `${number(f.failures_total)} in all.`, table(["when", "group", "member", "kind", "error"],
        f.failures.slice(0, 20).map(one => [clock(one.unix_s), group(one.group), `${one.member}, attempt ${one.attempt}`, one.kind, foreign(one.error, { class: "clamp" })]), { caption: "Newest failures" })) : null,
      f.lineages?.length > 1 ? card("Lineages", "The learner went back to a checkpoint and continued in a new lineage.", table(["lineage", "from", "at step", "when"],
        f.lineages.map(one => [number(one.lineage), one.parent ?? "–", number(one.fork_step), moment(one.unix_s)]), { caption: "Lineages" })) : null,
      f.refused?.length ? card("Refused calls", null, table(["when", "caller", "call", "answer", "times"],
        f.refused.map(one => [moment(one.unix_s), foreign(one.who), foreign(one.what), foreign(one.outcome, { class: "clamp" }), number(one.times)]), { caption: "Refused calls" })) : null,
      card("Events", null, eventList(f.events)));
    return run.state === "live";
  }
}

// --- hosts, roles

export class System {
  constructor({ run, main, live }) {
    Object.assign(this, { run, live });
    this.node = h("div", {});
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Hosts and processes")), this.node);
  }

  async refresh() {
    const [found, run] = await Promise.all([api("roles", { run: this.run }), api("run", { run: this.run })]);
    this.live(run.state);
    const devices = { ...found.about.devices }, store = found.store || {};
    const names = [...new Set([...Object.keys(devices), ...Object.keys(found.roles), ...Object.keys(found.leases)])].filter(name => name !== "store");
    const samplers = names.filter(name => found.roles[name]?.stats), newest = +(store.published || "0.0").split(".")[1];
    const lag = version => version ? `${version} (${Math.max(0, newest - +version.split(".")[1])} behind)` : "none";
    const mesh = axes => Object.entries(axes || {}).filter(([, size]) => size !== 1).map(([name, size]) => `${name} ${size}`).join(" × ") || "1 device";
    fill(this.node,
      card("Processes", null, table(["process", "host", "platform", "devices", "mesh", "restarts", "last report"], names.map(name => {
        const rows = found.roles[name] || {}, device = rows.devices || devices[name] || {};
        const t = Math.max(0, ...Object.values(rows).map(row => row.t || 0));
        return [h("b", {}, foreign(name)), foreign(device.host || "–"), device.platform || "–", String(device.devices ?? "–"), mesh(device.mesh), number(found.restarts[name] || 0), ago(t)];
      }), { caption: "Processes", right: [5] })),
      card("Samplers and actors", null, samplers.length ? table(["sampler", "weights", "tokens/s", "slots busy", "queue", "first token p50 / p99", "between tokens p50 / p99", "leases", "failed"],
        samplers.map(name => {
          const s = found.roles[name].stats;
          return [h("b", {}, foreign(name)), lag(s.version), compact(s.tokens_per_s), percent(s.slot_occupancy, 0), number(s.queue_depth),
            `${duration(s.ttft_p50_s)} / ${duration(s.ttft_p99_s)}`, `${duration(s.itl_p50_s)} / ${duration(s.itl_p99_s)}`,
            number(found.leases[name] || 0), number(Object.values(s.failed || {}).reduce((a, b) => a + b, 0))];
        }), { caption: "Samplers and actors", right: [2, 3, 4, 7, 8] }) : empty("no reports yet")),
      h("div", { class: "two" },
        card("Store", null, pairs({ "groups by state": Object.entries(store.counts || {}).filter(([, count]) => count).map(([state, count]) => `${state === "TRIMMED" ? "DURABLE" : state} ${number(count)}`).join(", "),
          published: store.published, "steps trained / durable": `${number(store.acked)} / ${number(store.durable)}`, "in flight": `${number(store.groups_in_flight)} of ${number(store.in_flight_window)} (at most ${number(store.in_flight_window_max)})`,
          "retained": known(store.retained_bytes) ? `${(store.retained_bytes / 2 ** 20).toFixed(1)} MB` : null, "slow": (store.slow || []).join(", "), "resting": Object.keys(store.backoff || {}).join(", "), "unreliable": Object.keys(store.unreliable || {}).join(", "), closed: store.closed })),
        card("Program", null, pairs({ command: (found.about.argv || []).join(" "), system: found.about.system, cores: found.about.cores, python: found.about.python, jaxroll: found.about.jaxroll, commit: found.about.commit, ...found.about.versions }))));
    return run.state === "live";
  }
}

const pairs = values => h("dl", { class: "pairs" }, Object.entries(values).filter(([, value]) => value !== null && value !== undefined && value !== "")
  .map(([name, value]) => h("div", {}, h("dt", {}, foreign(name)), h("dd", {}, foreign(value)))));

// --- configs

export class Config {
  constructor({ run, main, live }) {
    Object.assign(this, { run, live, others: [], only: false, text: "" });
    this.choice = h("select", { "aria-label": "compare with", onchange: event => { this.others = event.target.value ? [event.target.value] : []; this.only = this.others.length > 0; this.box.checked = this.only; this.refresh(); } });
    this.box = h("input", { type: "checkbox", onchange: event => { this.only = event.target.checked; this.draw(); } });
    this.search = h("input", { type: "search", placeholder: "find a key", "aria-label": "find a key", oninput: event => { this.text = event.target.value.toLowerCase(); this.draw(); } });
    this.node = h("div", {});
    fill(main, h("div", { class: "bar" }, h("h1", {}, "Config"), this.choice, h("label", {}, this.box, "differences only"), this.search), this.node);
  }

  async refresh() {
    const [{ runs }, { configs }, { state }] = await Promise.all([api("runs"), api("configs", { run: [this.run, ...this.others] }), api("run", { run: this.run })]);
    this.live(state);
    const names = runs.filter(run => !run.error && run.name !== this.run).map(run => run.name);
    if (JSON.stringify(names) !== this.names) {
      this.names = JSON.stringify(names);
      fill(this.choice, h("option", { value: "" }, "compare with …"), names.map(name => h("option", { value: name }, name)));
      this.choice.value = this.others[0] || "";
    }
    this.flat = [this.run, ...this.others].map(name => flat(configs[name]));
    this.draw();
    return false;
  }

  draw() {
    const [own, ...others] = this.flat, keys = [...new Set(this.flat.flatMap(one => Object.keys(one)))].sort();
    const rows = keys.filter(key => key.toLowerCase().includes(this.text)).map(key => {
      const differs = others.some(other => other[key] !== own[key]);
      return this.only && others.length && !differs ? null : h("tr", { class: differs ? "differs" : null }, h("th", { scope: "row" }, foreign(key)),
        [own, ...others].map((one, i) => h("td", { "data-heading": [this.run, ...this.others][i] }, foreign(one[key] ?? "–"))));
    }).filter(Boolean);
    fill(this.node, h("section", { class: "card" }, rows.length ? h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Config" },
      h("table", { class: "data config" }, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "key"), [this.run, ...this.others].map(name => h("th", { scope: "col" }, h("bdi", {}, name))))), h("tbody", {}, rows)))
      : empty(this.only ? "The configs are equal." : "No key matches.")));
  }
}

function flat(config, prefix = "") {
  const found = {};
  for (const [key, value] of Object.entries(config || {})) {
    if (value && typeof value === "object" && !Array.isArray(value) && Object.keys(value).length) Object.assign(found, flat(value, `${prefix}${key}.`));
    else found[prefix + key] = JSON.stringify(value);
  }
  return found;
}
