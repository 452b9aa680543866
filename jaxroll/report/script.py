"""The page's only script: moves the timeline's window. It makes text nodes only; the page allows no other script."""

from __future__ import annotations

import base64
import hashlib

SCRIPT = """
(() => {
  const box = document.querySelector(".timeline");
  if (!box) return;
  const end = +box.dataset.end, steps = JSON.parse(box.dataset.steps);
  let from = +box.dataset.from, span = +box.dataset.span;
  const detail = box.querySelector(".detail"), view = detail.querySelector("svg");
  const ticks = detail.querySelector(".ticks"), labels = detail.querySelector(".steps");
  const overview = box.querySelector(".overview"), brush = overview.querySelector(".brush");
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);
  const mark = (at, words) => {
    const node = document.createElement("span");
    node.style.left = (100 * (at - from) / span) + "%";
    node.textContent = words;
    return node;
  };
  const tickStep = () => {
    const rough = span / 8, power = 10 ** Math.floor(Math.log10(rough));
    return [1, 2, 5, 10].map(m => m * power).find(step => step >= rough * 0.999999);
  };
  const draw = () => {
    span = clamp(span, Math.min(0.2, end), end);
    from = clamp(from, 0, end - span);
    view.setAttribute("viewBox", `${from} 0 ${span} ${view.dataset.height}`);
    brush.style.left = (100 * from / end) + "%";
    brush.style.width = (100 * span / end) + "%";
    const step = tickStep(), marks = [];
    for (let i = Math.ceil(from / step); i * step <= from + span; i++) {
      marks.push(mark(i * step, +(i * step).toFixed(3) + " s"));
    }
    ticks.replaceChildren(...marks);
    const shown = steps.filter(([a, b]) => a >= from && b <= from + span && b - a > 0.025 * span);
    labels.replaceChildren(...shown.map(([a, b, number]) => mark((a + b) / 2, number)));
  };
  const share = (event, node) => {
    const area = node.getBoundingClientRect();
    return (event.clientX - area.left) / area.width;
  };
  detail.addEventListener("wheel", event => {
    event.preventDefault();
    const at = from + span * share(event, detail);
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      from += span * (event.deltaX || event.deltaY) / 800;
    } else {
      const wider = clamp(span * Math.exp(event.deltaY / 400), Math.min(0.2, end), end);
      from = at - (at - from) * wider / span;
      span = wider;
    }
    draw();
  }, { passive: false });
  detail.addEventListener("keydown", event => {
    const move = { ArrowLeft: -0.2, ArrowRight: 0.2 }[event.key], zoom = { "+": 0.7, "-": 1.4 }[event.key];
    if (move) from += move * span;
    if (zoom) { from += span * (1 - zoom) / 2; span *= zoom; }
    if (move || zoom) { event.preventDefault(); draw(); }
  });
  const drag = (node, moved) => node.addEventListener("pointerdown", event => {
    node.setPointerCapture(event.pointerId);
    let last = share(event, node);
    moved(last, 0);
    node.onpointermove = next => { const at = share(next, node); moved(at, at - last); last = at; draw(); };
    node.onpointerup = node.onpointercancel = () => { node.onpointermove = null; };
    draw();
  });
  drag(detail, (at, by) => { from -= by * span; });
  drag(overview, at => { from = at * end - span / 2; });
  draw();
})();
"""


def policy() -> str:
    """The page's Content-Security-Policy: nothing from anywhere, this script by its hash, styles of the page itself."""
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    return f"default-src 'none'; style-src 'unsafe-inline'; img-src data:; script-src 'sha256-{digest}'"
