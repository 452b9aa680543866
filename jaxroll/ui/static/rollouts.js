// Rollouts: a searchable list of groups, and a group with its members token by token.
import { h, fill, api, card, chip, empty, foreign, shown, number, duration, moment, ago, known } from "./dom.js";
import { css } from "./charts.js";

const REASONS = {
  stale: "a token would have been older than the age bound allows when it was trained",
  lineage: "the learner went back to an older step, and the weights that sampled it belong to an abandoned lineage",
  surplus: "it was a redundant group, and enough others were complete",
  last_batch: "the run had all its steps, or too few groups were left for a whole batch",
};
const explained = reason => {
  const [kind, rest] = [reason.split(":")[0], reason.split(":").slice(1).join(":")];
  if (kind === "filtered") return `the filter rejected its rewards${rest ? ` (${rest})` : ""}`;
  return REASONS[kind] || "";
};
const STATE_KIND = { DURABLE: "good", ACKED: "good", CLAIMED: "live", READY: "live", EXPIRED: "warn", DEAD: "bad" };
const ORDERS = ["newest", "oldest", "reward", "low reward", "longest", "most failures"];
const PAGE = 50;

export class Rollouts {
  constructor({ run, main, live, link }) {
    Object.assign(this, { run, main, live, link, query: {}, offset: 0 });
    this.list = h("div", {});
    this.detail = h("div", {});
    this.form = this.searchForm();
    this.head = h("div", {}, h("div", { class: "bar" }, h("h1", {}, "Rollouts")), this.form);
    fill(main, this.head, this.list, this.detail);
  }

  searchForm() {
    const field = (name, label, attributes) => h("label", {}, h("span", {}, label), h("input", { name, ...attributes }));
    this.states = h("select", { name: "state" }, h("option", { value: "" }, "any"));
    const form = h("form", { class: "search card", role: "search", onsubmit: event => { event.preventDefault(); this.submit(); }, onchange: () => this.submit() },
      field("text", "text", { type: "search", placeholder: "prompt, reason, error, group", class: "wide" }),
      field("answer", "answer", { type: "search", placeholder: "text of the model", class: "wide" }),
      h("label", {}, h("span", {}, "state"), this.states),
      field("step", "step", { type: "number", min: 0 }), field("holder", "sampler", { type: "text", placeholder: "sampler-0" }),
      field("reward_from", "reward from", { type: "number", step: "any" }), field("reward_to", "to", { type: "number", step: "any" }),
      h("label", {}, h("span", {}, "order"), h("select", { name: "order" }, ORDERS.map(name => h("option", { value: name }, name)))),
      h("button", { type: "submit" }, "Search"));
    return form;
  }

  submit() {
    this.query = Object.fromEntries([...new FormData(this.form)].filter(([, value]) => value));
    this.offset = 0;
    this.refresh();
  }

  move(rest) {
    const group = rest.length ? +rest[0] : null, before = this.group;
    this.group = Number.isInteger(group) ? group : null;
    this.head.hidden = this.list.hidden = this.group !== null;
    this.detail.hidden = this.group === null;
    if (before !== undefined && before !== this.group) this.refresh();
  }

  async refresh() {
    if (this.group !== null) return this.showGroup();
    const found = await api("rollouts", { run: this.run, ...this.query, offset: this.offset, limit: PAGE });
    const chosen = this.states.value, states = Object.entries(found.states);
    const key = JSON.stringify(states);
    if (key !== this.stateKey && document.activeElement !== this.states) {
      this.stateKey = key;
      fill(this.states, h("option", { value: "" }, "any"), states.map(([state, count]) => h("option", { value: state }, `${state} (${number(count)})`)));
      this.states.value = chosen;
    }
    const page = h("div", { class: "pages" },
      h("button", { type: "button", disabled: this.offset === 0, onclick: () => this.turn(-PAGE) }, "← previous"),
      h("span", { role: "status" }, found.total ? `${number(this.offset + 1)} to ${number(Math.min(found.total, this.offset + PAGE))} of ${number(found.total)} groups` : "no group matches"),
      known(found.searched) && found.searched < found.kept ? h("span", {}, `(answers of the newest ${number(found.searched)} of ${number(found.kept)} kept rollouts were searched)`) : null,
      h("button", { type: "button", disabled: this.offset + PAGE >= found.total, onclick: () => this.turn(PAGE) }, "next →"));
    const rows = found.groups.map(group => this.row(group));
    const focus = document.activeElement?.dataset?.group;
    fill(this.list, page, h("ul", { class: "rollouts" }, rows));
    if (focus) this.list.querySelector(`[data-group="${CSS.escape(focus)}"]`)?.focus();
    const { state } = await api("run", { run: this.run });
    this.live(state);
    return state === "live" && this.offset === 0;
  }

  turn(by) { this.offset = Math.max(0, this.offset + by); this.refresh(); scrollTo(0, 0); }

  row(group) {
    const done = group.members.filter(one => known(one.reward) && one.state === "done"), tokens = done.reduce((sum, one) => sum + (one.tokens || 0), 0);
    const mean = done.length ? done.reduce((sum, one) => sum + one.reward, 0) / done.length : null;
    const steps = done.map(one => one.oldest_step).filter(known);
    return h("li", {}, h("a", { href: this.link(this.run, "rollouts", group.id), "data-group": group.id },
      h("span", { class: "id" }, `#${group.id}`),
      h("span", { class: "what" }, foreign(group.question || "(its text is not kept)", { class: "clamp" }),
        h("span", { class: "muted small" }, chip(group.state, STATE_KIND[group.state] || "muted"), group.reason ? [" ", foreign(group.reason)] : null,
          known(group.claim_step) ? ` step ${group.claim_step}` : null, steps.length ? `, sampled from ${Math.min(...steps)}` : null, tokens ? `, ${number(tokens)} tokens` : null)),
      h("span", { class: "squares", "aria-label": `rewards ${done.map(one => number(one.reward)).join(", ")}` }, group.members.map(one => h("i", { class: one.state, title: `member ${one.member}: ${one.state}${known(one.reward) ? `, reward ${number(one.reward)}` : ""}`,
        style: one.state === "done" && known(one.reward) ? { background: rewardColour(one.reward) } : null }))),
      h("span", { class: "mean" }, number(mean))));
  }

  // --- one group

  async showGroup() {
    const id = this.group;
    const found = await api("rollout", { run: this.run, group: id });
    if (id !== this.group) return;
    const { group, task, claim, members, failures, events } = found, [before, after] = found.neighbours;
    const key = JSON.stringify([id, group, members.map(one => [one.state, one.attempt, one.kept])]);
    if (key === this.groupKey) return true;
    this.groupKey = key;
    const turn = (to, text) => known(to) ? h("a", { class: "button", href: this.link(this.run, "rollouts", to) }, text) : null;
    const why = group.reason ? [foreign(group.reason), explained(group.reason) ? `: ${explained(group.reason)}` : ""] : null;
    fill(this.detail,
      h("div", { class: "bar" }, h("a", { class: "button", href: this.link(this.run, "rollouts") }, "← all rollouts"), h("h1", {}, `Group ${id}`), chip(group.state, STATE_KIND[group.state] || "muted"), turn(before, "← previous"), turn(after, "next →")),
      card(null, null,
        why ? h("p", { class: group.state === "EXPIRED" || group.state === "DEAD" ? "reason" : "muted" }, h("b", {}, group.state === "DEAD" ? "It ended because " : group.state === "EXPIRED" ? "It expired: " : ""), why) : null,
        h("p", { class: "muted" }, claim ? `Trained in step ${claim.step} of lineage ${claim.lineage}, place ${claim.place}. ` : "Not claimed by a step. ",
          `Issued ${moment(group.issued_unix_s)}`, group.ended_unix_s ? `, ended ${duration(group.ended_unix_s - group.issued_unix_s)} later. ` : ". ",
          known(group.reissue_of) ? ["It reissues the prompt of ", h("a", { href: this.link(this.run, "rollouts", group.reissue_of) }, `group ${group.reissue_of}`), ". "] : null,
          "Question ", h("code", {}, foreign(group.question_hash)), task ? [", environment ", h("code", {}, foreign(task.env))] : null, "."),
        task ? task.messages.map(message => h("div", { class: "message" }, h("b", {}, foreign(message.role)), h("pre", {}, foreign(message.content)))) : empty("The text of the prompt is not kept.")),
      this.membersCard(id, members),
      failures.length ? card("Failures", null, h("ul", { class: "events" }, failures.map(one => h("li", {}, h("time", {}, `${duration(one.ago_s)} ago`), h("b", {}, `member ${one.member}, attempt ${one.attempt}, ${one.kind}`), foreign(one.error))))) : null,
      h("details", { class: "card" }, h("summary", {}, `Events (${events.length})`), h("ul", { class: "events" }, events.map(one => h("li", {}, h("time", {}, `${duration(one.ago_s)} ago`), h("b", {}, foreign(one.kind)), foreign(one.what))))));
    const first = members.find(one => one.kept);
    if (first) this.showMember(id, first.member);
    return true;
  }

  membersCard(id, members) {
    this.tokens = h("div", { class: "member" });
    this.buttons = new Map();
    const rows = members.map(one => {
      const button = h("button", { type: "button", class: "link", "aria-pressed": "false", disabled: !one.kept, onclick: () => this.showMember(id, one.member) }, `member ${one.member}`);
      this.buttons.set(one.member, button);
      return h("li", {}, h("i", { class: "square", style: known(one.reward) ? { background: rewardColour(one.reward) } : null }), button,
        h("span", {}, known(one.reward) ? `reward ${number(one.reward)}` : one.state),
        h("span", { class: "muted" }, known(one.advantage) ? `${one.advantage >= 0 ? "+" : "−"}${number(Math.abs(one.advantage))} against the mean` : ""),
        h("span", { class: "muted" }, [known(one.tokens) ? `${number(one.tokens)} tokens` : null, known(one.oldest_step) ? ` at ${one.lineage}.${one.oldest_step}${one.newest_step !== one.oldest_step ? ` to ${one.newest_step}` : ""}` : null]),
        h("span", { class: "muted" }, foreign(one.holder), one.attempt > 1 ? `, attempt ${one.attempt}` : ""));
    });
    return card("Members", "The advantage here is the reward less the mean of the group; the algorithm of the run may scale it.", h("ul", { class: "members" }, rows), this.tokens);
  }

  async showMember(group, member) {
    let found;
    try { found = await api("member", { run: this.run, group, member }); } catch (error) { fill(this.tokens, empty(error.message)); return; }
    if (group !== this.group) return;
    for (const [number_, button] of this.buttons) button.setAttribute("aria-pressed", String(number_ === member));
    const summary = this.buttons.get(member).parentElement;
    const advantage = parseFloat(summary.children[3].textContent.replace("−", "-").replace(/,/g, ""));
    this.member = { found, advantage: Number.isFinite(advantage) ? advantage : 0 };
    const choice = h("select", { "aria-label": "color of the tokens", onchange: event => { this.by = event.target.value; this.paint(); } },
      [["logprob", "by log-prob"], ["version", "by version"], ["advantage", "by advantage"], ["none", "no color"]].map(([value, text]) => h("option", { value }, text)));
    choice.value = this.by ||= "logprob";
    const parts = Object.entries(found.reward_parts);
    this.legend = h("div", { class: "legend" });
    this.about = h("p", { class: "tip", role: "status" }, "Point at a token, or tap it, for its values.");
    fill(this.tokens, h("div", { class: "bar" }, h("h3", {}, `Member ${member}`), choice, this.legend),
      parts.length ? h("dl", { class: "pairs" }, h("div", {}, h("dt", {}, "reward"), h("dd", {}, number(found.reward))), parts.map(([name, value]) => h("div", {}, h("dt", {}, foreign(name)), h("dd", {}, number(value))))) : null,
      h("p", { class: "muted" }, `Ended by ${found.finish}. `, found.extracted !== null ? ["Scored: ", foreign(found.extracted)] : null, found.no_text ? ` ${found.no_text}` : null),
      this.about, found.segments.map((segment, i) => this.segment(segment, i)));
    this.paint();
  }

  segment(segment, index) {
    const tokens = segment.tokens.map((id, i) => {
      const piece = segment.pieces?.[i], text = !piece || piece === "\ufffd" ? `⟨${id}⟩` : shown(piece);
      return h("span", { class: segment.logprobs[i] === null ? "token" : "token sampled", "data-at": `${index} ${i}` }, text);
    });
    const box = h("div", { class: `segment ${segment.source}`, onpointerover: event => this.describe(event.target), onclick: event => this.describe(event.target) },
      h("span", { class: "who" }, segment.branch ? "another conversation, " : "", segment.source === "model" ? "sampled" : "shown"),
      h("div", { class: "text", dir: "auto" }, tokens), segment.left_out ? h("p", { class: "muted" }, `${number(segment.left_out)} more tokens are not shown.`) : null);
    return box;
  }

  describe(node) {
    if (!node.dataset?.at) return;
    const [s, i] = node.dataset.at.split(" ").map(Number), segment = this.member.found.segments[s];
    const logprob = segment.logprobs[i];
    fill(this.about, h("b", {}, h("bdi", {}, `“${node.textContent}”`)), ` id ${segment.tokens[i]}`, logprob === null ? ", not sampled" :
      [`, log-prob ${number(logprob)} (probability ${number(Math.exp(logprob))}), version ${segment.versions[i]}`, segment.trained[i] ? "" : ", masked: too old"]);
  }

  paint() {
    const by = this.by, { found, advantage } = this.member;
    const versions = [...new Set(found.segments.flatMap(one => one.versions).filter(Boolean))];
    for (const node of this.tokens.querySelectorAll(".token.sampled")) {
      const [s, i] = node.dataset.at.split(" ").map(Number), segment = found.segments[s];
      node.style.background = by === "logprob" ? logprobColour(segment.logprobs[i]) : by === "version" ? versionColour(versions.indexOf(segment.versions[i]))
        : by === "advantage" ? (segment.trained[i] ? advantageColour(advantage) : "transparent") : "transparent";
    }
    const key = (background, text) => h("span", {}, h("i", { class: "key", style: { background } }), text);
    fill(this.legend, by === "logprob" ? [key(logprobColour(-0.01), "likely"), key(logprobColour(-1), "0.37"), key(logprobColour(-4), "unlikely")]
      : by === "version" ? versions.slice(0, 8).map((version, i) => key(versionColour(i), version)) : by === "advantage" ? key(advantageColour(advantage), `${number(advantage)} for every trained token`) : null);
  }

  repaint() { if (this.member && this.group !== null) this.paint(); }
}

const mix = (name, share) => `color-mix(in srgb, ${css(name)} ${Math.round(100 * Math.min(1, Math.max(0, share)))}%, transparent)`;
const logprobColour = value => value === null ? "transparent" : mix("--publish", 0.06 + 0.7 * Math.min(1, -value / 4));
const versionColour = place => mix(["--sampler", "--learner", "--publish", "--evaluator", "--both", "--warm"][place % 6], 0.35);
const advantageColour = value => mix(value >= 0 ? "--good" : "--bad", Math.min(0.6, 0.08 + 0.5 * Math.abs(value)));
const rewardColour = reward => reward <= 0 ? css("--bad") : reward >= 1 ? css("--good") : `color-mix(in srgb, ${css("--good")} ${Math.round(100 * reward)}%, ${css("--bad")})`;
