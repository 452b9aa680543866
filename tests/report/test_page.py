"""`jaxroll report`: the page is well-formed, self-contained and safe against model output, for any run."""

import base64
import hashlib
import io
import json
from html.parser import HTMLParser

import pytest
from rich.console import Console

from jaxroll.errors import ConfigError
from jaxroll.report import activity, formats, plots, record, sections, summary, work
from jaxroll.report import page as report
from tests.harness.run_folder import GROUPS, REQUIRED, STARTED, make_run, write_rows, write_run_file

VOID = {"meta", "br", "hr", "img", "input", "link"}
TITLES = (
    "Learning", "Activity of the processes", "Invariants", "Time breakdown", "Before and after", "Events",
    "Age of the trained tokens", "Tokens per second", "Weight transfers", "States of the groups", "Settings",
    "Off-policy by age",
)  # fmt: skip
HOSTILE = "</bdi><script>alert(1)</script>\"'><img src=x onerror=alert(2)>\u202e&amp;\x00\ud800]]>"


class Page(HTMLParser):
    """Elements, attributes and text of a page; fails on elements that are not closed in order."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open, self.elements, self.texts = [], [], {}
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open and self.open[-1] == tag, f"</{tag}> in {self.open[-3:]}"
        self.open.pop()

    def handle_data(self, data):
        self.texts[self.open[-1] if self.open else ""] = self.texts.get(self.open[-1] if self.open else "", "") + data

    def all(self, name):
        return [attributes for tag, attributes in self.elements if tag == name]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run"))


def page_of(run_dir) -> str:
    run = record.load(run_dir)
    return report.write_page(run, summary.summary(run)).read_text(encoding="utf-8")


# --- the page


def test_the_page_is_complete_and_loads_nothing(run_dir):
    text = page_of(run_dir)
    page = Page(text)
    assert "http://" not in text and "https://" not in text and "@import" not in text and "url(" not in text
    assert not [a for _, a in page.elements if {"src", "srcset", "action", "data", "poster"} & a.keys()]
    assert {a["href"] for _, a in page.elements if "href" in a} == {"#lanes"}
    assert not page.all("link") and not page.all("iframe")
    for title in TITLES:
        assert title in page.texts["h2"], title
    assert len(page.all("svg")) > 10


def test_only_the_pages_own_script_may_run(run_dir):
    page = Page(page_of(run_dir))
    policy = next(a["content"] for a in page.all("meta") if a.get("http-equiv") == "Content-Security-Policy")
    digest = base64.b64encode(hashlib.sha256(page.texts["script"].encode()).digest()).decode()
    assert page.all("script") == [{}] and page.texts["script"] == report.SCRIPT
    assert policy.startswith("default-src 'none'") and policy.endswith(f"script-src 'sha256-{digest}'")
    assert page.all("style") and "prefers-color-scheme: dark" in page.texts["style"]


def test_model_output_is_shown_as_text(tmp_path):
    text = page_of(make_run(tmp_path, steps=20, steps_wanted=20, hostile=HOSTILE))
    page = Page(text)
    assert page.all("script") == [{}] and page.texts["script"] == report.SCRIPT and not page.all("img")
    assert not [name for _, attributes in page.elements for name in attributes if name.startswith("on")]
    assert "\x00" not in text and text.encode("utf-8")
    # Three per example (question, both answers), one failure, one event; each element isolates its direction marks.
    assert page.texts["bdi"].count("<script>alert(1)</script>") == 3 * 8 + 2


def test_markup_escapes_everything_else():
    assert (
        plots.tag("b", "<i>", class_='"x"', hidden=True, title=None) == '<b class="&quot;x&quot;" hidden>&lt;i&gt;</b>'
    )
    assert plots.tag("p", plots.tag("br"), 3) == "<p><br>3</p>"
    assert plots.text("a\x00\x1b\n\udfff") == "a\u2400\u241b\n\ufffd"
    assert plots.tag("line", x1=1 / 3, stroke_width=2.0) == '<line x1="0.33" stroke-width="2"></line>'


@pytest.mark.parametrize("rows", [[], [{"t": STARTED + 1.0, "role": "learner", "kind": "event", "text": "hello"}]])
def test_a_run_without_steps_has_a_page_and_a_summary(tmp_path, rows, capsys):
    write_run_file(tmp_path)
    if rows:
        write_rows(tmp_path, rows)
    assert report.main(tmp_path, as_json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.keys() >= REQUIRED and figures["steps"] == 0 and figures["accuracy_end"] is None
    assert "not evaluated yet" in Page((tmp_path / "report.html").read_text(encoding="utf-8")).texts["span"]


def test_a_live_run_with_a_torn_last_line(tmp_path):
    make_run(tmp_path, steps=3, steps_wanted=60)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"t": 1.0, "kind": "st')
    run = record.load(tmp_path)
    figures = summary.summary(run)
    assert figures["steps"] == 3 and figures["accuracy_start"] == figures["accuracy_end"]
    assert "3 / 60" in Page(report.write_page(run, figures).read_text(encoding="utf-8")).texts["b"]


def test_evaluations_of_rewound_steps_are_left_out(tmp_path):
    from jaxroll.records import Version
    from jaxroll.store.core import events as ev
    from tests.harness.run_folder import LogMaker

    write_run_file(tmp_path)
    log = LogMaker()
    log.add(ev.Began(Version(0, 0), "L"), ev.Began(Version(1, 2), "M", parent=0))
    log.write(tmp_path)
    row = {"role": "evaluator", "kind": "eval", "n": 2, "correct": "10", "accuracy": 0.5}
    rows = [row | {"t": float(s), "step": s, "lineage": 0} for s in (1, 2, 3)]
    write_rows(tmp_path, [*rows, row | {"t": 4.0, "step": 4, "lineage": 1}])
    assert [row["step"] for row in record.load(tmp_path).rows] == [1, 2, 4]


# --- the command


def test_json_has_every_figure_of_a_whole_run(run_dir, capsys):
    assert report.main(run_dir, as_json=True) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures.keys() >= REQUIRED and not [key for key in REQUIRED if figures[key] is None]
    assert figures["steps"] == 60 and figures["restarts"] == 1 and figures["heldout_in_train"] == 0
    assert figures["conservation_residual"] == 0 and figures["groups_trained_twice"] == 0
    assert (
        figures["accuracy_end"] - figures["accuracy_start"] == pytest.approx(figures["accuracy_gain"])
        and figures["accuracy_gain"] > 0.2
    )
    assert figures["learner_mesh"]["fsdp"] == 2 and figures["sampler_mesh"]["tensor"] == 2
    assert 0.5 < figures["overlap"] < 1 and figures["age_max"] == 1 and 0 < figures["age_mean"] < 1
    steps = [row for row in record.load(run_dir).rows if row["kind"] == "step"]
    assert figures["samples_per_s"] == pytest.approx(60 * 4 * GROUPS / figures["rl_seconds"]) and len(steps) == 60


def test_the_summary_for_a_person(run_dir):
    run = record.load(run_dir)
    out = io.StringIO()
    report.show(run, summary.summary(run), Console(file=out, width=100))
    text = out.getvalue()
    for words in ("held-out accuracy", "60 of 60", "fsdp 2", "tensor 2", "overlap", "wasted tokens"):
        assert words in text
    assert " NO " not in text and "NO  " not in text


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda path: None, "no such folder"),
        (lambda path: path.mkdir(), "no run here"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("{")), "unreadable"),
        (lambda path: (path.mkdir(), (path / "run.json").write_text("[]")), r"lacks schedule\.alpha"),
        (lambda path: (write_run_file(path), (path / "heldout.json").write_text("{]")), "heldout"),
    ],
)
def test_a_folder_that_is_not_a_run_is_refused(tmp_path, make, words):
    make(tmp_path / "run")
    with pytest.raises(ConfigError, match=words):
        report.main(tmp_path / "run", as_json=False)


# --- parts


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1]), (3, 47, [10, 20, 30, 40]), (-1, 1, [-1, -0.5, 0, 0.5, 1]), (5, 5, [5])],
)
def test_ticks_are_round_numbers_in_the_range(low, high, expected):
    assert plots.ticks(low, high) == expected


def test_smoothing_and_thinning_keep_the_mean():
    points = [(float(x), float(x % 7)) for x in range(7000)]
    few = plots.thinned(points, 1000)
    assert len(few) == 1000 and sum(y for _, y in few) / 1000 == pytest.approx(sum(y for _, y in points) / 7000)
    assert plots.smoothed([(0, 1.0), (1, 4.0), (2, 1.0)], 1) == [(0, 2.5), (1, 2.0), (2, 2.5)]


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (formats.percent(0.47123), "47.1 %"), (formats.percent(None), "–"), (formats.points(-0.0212), "−2.1"),
        (formats.number(1234567), "1,234,567"), (formats.number(0.000123), "0.000123"),
        (formats.number(1.5e-7), "1.50e−07"), (formats.number(float("nan")), "–"), (formats.number(0.0), "0"),
        (formats.duration(252), "4 min 12 s"),
        (formats.duration(7500), "2 h 05 min"), (formats.duration(3.14159), "3.14 s"),
        (formats.mesh({"data": 1, "fsdp": 2, "tensor": 2}), "fsdp 2 × tensor 2"),
        (formats.mesh({"data": 1}), "1 device"),
    ],
)  # fmt: skip
def test_numbers_as_text(written, expected):
    assert written == expected


@pytest.mark.parametrize(("who", "lanes"), [("colocated", 2), ("sampler-0", 1), ("sampler-1", 0), ("store", 0)])
def test_the_death_of_a_process_is_drawn_where_its_roles_are(who, lanes):
    roles = [activity.Lane(role, {"decode": [(1.0, 9.0)]}) for role in ("learner", "sampler-0")]
    steps = [{"t0": 1.0, "t1": 2.0, "step": 1}]
    drawn = work.timeline(roles, steps, activity.RunClock(0.0), 10.0, [(who, 4.0)])
    assert str(drawn).count('class="died"') == lanes


def test_the_close_up_is_within_the_run():
    spans = [(float(s), s + 0.8, s) for s in range(100)]
    window = work.close_up(spans, 100.0)
    assert window.start >= 0 and window.start + window.span <= 100.0 and window.span == 8.0
    assert work.close_up(spans[:1], 0.8).span == pytest.approx(0.8)
    assert work.close_up([], 300.0) == work.Window(0.0, 300.0)


def test_many_spans_are_drawn_as_fewer_without_losing_time():
    spans = [(i * 0.002, i * 0.002 + 0.0015) for i in range(3 * work.MAX_SPANS)]
    path = work.bars(spans, 0.0, 10.0)
    assert 0 < path.count("M") <= work.MAX_SPANS
    assert path.startswith("M0.000 0H") and f"{spans[-1][1]:.3f}" in path


def test_lag_of_weights_is_counted_within_a_lineage():
    published = ((10.0, "0.0"), (20.0, "0.1"), (30.0, "0.2"), (40.0, "1.4"))
    reports = ((5, "None"), (11, "0.0"), (21, "0.0"), (31, "0.1"), (32, "0.2"), (41, "0.2"), (42, "1.4"))
    stats = [{"t": float(t), "version": version} for t, version in reports]
    found = work.lags(stats, published)
    assert found == [0, 1, 1, 0, 0] and work.by_lag(found) == {0: 0.6, 1: 0.4}


def test_answers_are_matched_by_question():
    first = {"examples": [{"prompt": "a", "text": "1", "ok": False}, {"prompt": "b", "text": "2", "ok": True}]}
    last = {"examples": [{"prompt": "c", "text": "4", "ok": True}, {"prompt": "b", "text": "3", "ok": True}]}
    found = sections.questions([first, last])
    assert [(q.prompt, q.before.text, q.after and q.after.text) for q in found] == [("a", "1", None), ("b", "2", "3")]
    assert sections.questions([first])[0].after is None and sections.questions([]) == []


def test_the_extracted_answer_is_shown_if_it_is_a_part_of_the_text():
    example = {"prompt": "a", "text": "<think>7</think>8", "ok": True, "extracted": "8"}
    for shown, row in ((True, example), (False, example | {"text": "8"}), (False, example | {"extracted": None})):
        page = str(sections.table(sections.questions([{"examples": [row]}]), 0, 0))
        assert ("scored: " in page) == shown


def test_the_scales_of_a_plot_give_the_values_of_its_lines(run_dir):
    """The page's script reads values from the drawing, so that the page holds them once."""
    run = record.load(run_dir)
    rewards = [row["reward_mean"] for row in plots.view_of(run, summary.summary(run)).steps]
    drawn = Page(page_of(run_dir))
    lines = [line for line in drawn.all("path") if "data-name" in line]
    assert {"reward", "moving mean", "held-out accuracy", "sampler-0", "learner", "age 0", "age 1", ""} == {
        line["data-name"] for line in lines
    }
    plot = next(one for one in drawn.all("svg") if one.get("class") == "plot")
    (x_low, x_high, left, right), (low, high, bottom, top) = (
        map(float, plot[key].split()) for key in ("data-x", "data-y")
    )
    points = [[float(at) for at in point.split()] for point in lines[0]["d"][1:].split("L")]
    read = [low + (high - low) * (y - bottom) / (top - bottom) for _, y in points]
    assert read == pytest.approx(rewards, abs=1e-3)
    assert [round(x_low + (x_high - x_low) * (x - left) / (right - left)) for x, _ in points] == list(
        range(1, len(rewards) + 1)
    )
