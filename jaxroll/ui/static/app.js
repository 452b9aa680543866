// Routes, header, and the clock that refreshes the view. A route is #/RUN/VIEW/…, with names encoded.
import { h, fill, api, post, Refused, empty } from "./dom.js";
import * as views from "./views.js";
import { Rollouts } from "./rollouts.js";

const EVERY_MS = 2000, SLOW_MS = 10000;
const TABS = [["overview", "Overview"], ["curves", "Curves"], ["timeline", "Timeline"], ["weights", "Weights"],
  ["rollouts", "Rollouts"], ["faults", "Faults"], ["system", "System"], ["config", "Config"]];
const VIEWS = { overview: views.Overview, curves: views.Curves, timeline: views.TimelineView, weights: views.Weights,
  rollouts: Rollouts, faults: views.Faults, system: views.System, config: views.Config };

const nodes = { main: document.getElementById("view"), tabs: document.getElementById("tabs"), crumb: document.getElementById("crumb"),
  live: document.getElementById("live"), toast: document.getElementById("toast") };
let current = null, timer = null, last = "";

export const link = (...parts) => `#/${parts.map(encodeURIComponent).join("/")}`;

function route() {
  const parts = location.hash.replace(/^#\/?/, "").split("/").filter(Boolean).map(part => {
    try { return decodeURIComponent(part); } catch { return part; }
  });
  if (location.hash.startsWith("#code=")) { history.replaceState(null, "", "/"); return []; }
  return parts;
}

async function show() {
  const [run, tab = "overview", ...rest] = route(), key = JSON.stringify([run, tab]);
  if (current && key === last && current.move) return current.move(rest);
  last = key;
  current?.destroy?.();
  clearTimeout(timer);
  fill(nodes.main);
  nodes.tabs.hidden = !run;
  fill(nodes.tabs, run ? TABS.map(([name, text]) => h("a", { href: link(run, name), "aria-current": name === tab ? "page" : null }, text)) : []);
  nodes.tabs.querySelector("[aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  fill(nodes.crumb, run ? h("bdi", {}, run) : "Runs");
  document.title = run ? `${run} · JaxRoll` : "JaxRoll";
  const Kind = run ? VIEWS[tab] || views.Overview : views.RunList;
  current = new Kind({ run, main: nodes.main, link, live, toast });
  current.move?.(rest);
  await tick(current);
}

async function tick(view) {
  let wait = EVERY_MS;
  try {
    const isLive = await view.refresh();
    wait = isLive === false ? SLOW_MS : EVERY_MS;
    if (nodes.live.dataset.state === "lost") live("");
  } catch (error) {
    if (view !== current) return;
    if (error instanceof Refused) {
      if (!nodes.main.childElementCount) fill(nodes.main, empty(error.message));
      toast(error.message);
      wait = SLOW_MS;
    } else if (error.name !== "AbortError") {
      live("lost");
      console.error(error);
    }
  }
  if (view === current) timer = setTimeout(() => document.hidden ? later(view) : tick(view), wait);
}

function later(view) {
  const again = () => { if (!document.hidden) { document.removeEventListener("visibilitychange", again); if (view === current) tick(view); } };
  document.addEventListener("visibilitychange", again);
}

const STATES = { live: "live", finished: "finished", stopped: "stopped", lost: "the server does not answer" };
function live(state) {
  nodes.live.dataset.state = state;
  nodes.live.textContent = STATES[state] || "";
}

let hiding = null;
function toast(text) {
  nodes.toast.textContent = text;
  nodes.toast.hidden = false;
  clearTimeout(hiding);
  hiding = setTimeout(() => { nodes.toast.hidden = true; }, 6000);
}

function theme(name) {
  if (name) { document.documentElement.dataset.theme = name; localStorage.setItem("theme", name); }
  current?.repaint?.();
}
const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
const kept = localStorage.getItem("theme");
if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
document.getElementById("theme").addEventListener("click", () => theme(dark() ? "light" : "dark"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => theme());
document.getElementById("logout").addEventListener("click", async () => { await post("/logout", {}); location.replace("/"); });
addEventListener("hashchange", () => { show(); nodes.main.focus({ preventScroll: true }); scrollTo(0, 0); });
show();
