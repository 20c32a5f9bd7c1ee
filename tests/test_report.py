"""Reports: one file that asks nothing of the network, says what is in its pictures, and gives no secret away."""

from __future__ import annotations

import json
import re
import time
from html.parser import HTMLParser
from pathlib import Path
from statistics import median

import numpy as np
import pytest
from click.testing import CliRunner
from test_compare import curve, log, run_of
from test_curves import synthetic

from recipes import curves, drawing, lights, live, notebook, report
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.metrics import as_metrics
from recipes.run.directory import Run, open_run, update_state, write_json

SECRET = "hf_0123456789abcdef" + "a1B2" * 5
LOADING = {"src", "srcset", "href", "action", "data", "poster", "background", "formaction", "cite", "ping", "code"}


VOID = {"meta", "img", "source", "br", "wbr", "link", "input"}
PICTURE = "data:image/png;base64,"


class Page(HTMLParser):
    """The tags of a page, its text, and whatever it would load from elsewhere."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.images, self.loaded, self.text = [], [], [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.tags.append(tag)
        if tag not in VOID:
            self.open.append(tag)
        self.loaded += [v for name, v in attrs if name in LOADING and not (v or "").startswith(PICTURE)]
        self.loaded += [name for name in given if name.startswith("on")]
        self.loaded += re.findall(r"url\(|@import", given.get("style") or "")
        if tag == "img":
            self.images.append(given.get("alt"))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open[-1:] == ["style"]:
            self.loaded += re.findall(r"url\(|@import", data)
        if self.tags[-1:] == ["wbr"]:  # the word goes on
            self.text[-1] += data
        else:
            self.text.append(data)


def read(path) -> Page:
    text = Path(path).read_text(encoding="utf-8")
    assert len(text.encode()) <= 2_000_000
    page = Page(text)
    assert page.open == []
    assert page.loaded == []
    assert {"script", "iframe", "object", "link", "base", "form"} & set(page.tags) == set()
    assert page.images
    assert all(len(words or "") > 30 for words in page.images)
    assert "default-src 'none'" in text
    assert "prefers-color-scheme:dark" in text
    assert page.tags.count("source") == page.tags.count("img")
    return page


@pytest.fixture
def run(tmp_path):
    """A run that failed, with provenance, an export, rollouts, and a secret and markup wherever text is anybody's."""
    data = curve(30, **{"perf/throughput": np.full(30, 512.0), "actor/perf/max_memory_allocated_gb": np.full(30, 40.5)})
    made = Run(Path(run_of(tmp_path, "run", data, ["optimizer.lr=1e-3"])))
    evil = f"<script>alert('{SECRET}')</script>"
    update_state(made, state="failed", cause=f"exit code 1 {evil}", attempts=[{"number": 1, "seconds": 61.0}])
    made.log().write_text(f"{evil}\nRuntimeError: NPU out of memory. Tried to allocate 2.00 GiB\n{evil}\n")
    write_json(
        made.path / "provenance.json",
        {
            "gathered": "2026-01-01T00:00:00+00:00",
            "workbook": "0.1.0",
            "hardware": {"host": "node-1", "memory": 2**40, "devices": [{"name": "910B2"}] * 8, "note": evil},
            "packages": {"verl": "0.9.1", "torch": "2.11.0", "evil": evil},
            "repositories": {"verl": {"commit": "0123456789abcdef", "branch": evil, "dirty": []}},
            "model": {"model.path": {"kind": "hub", "path": evil, "revision": None}},
            "data": {},
            "faults": [f"git could not be gathered: token={SECRET}"],
        },
    )
    folder = made.attempt(1) / "rollouts"
    folder.mkdir()
    line = {"input": evil, "output": f"{evil} and " * 40, "score": 0.0, "step": 30, "gts": evil}
    (folder / "30.jsonl").write_text(json.dumps(line) + "\n")
    return made


def test_a_failed_run_on_one_page(run, tmp_path):
    page = read(report.write([run.path], tmp_path / "out/report.html"))
    text = " ".join(page.text)
    assert SECRET not in Path(tmp_path / "out/report.html").read_text()
    for words in (
        "failed: exit code 1",
        "Why it failed",
        "out of memory",
        "The run may not be believed.",
        "tokens/s/device",
        "40.5 allocated",
        "8 devices (910B2)",
        "verl 0.9.1",
        "optimizer.lr",
        "step 30, line 1: reward 0",
        "alert(",
    ):
        assert words in text, words
    assert "Reward: mean of five steps" in page.images[0]


def test_a_log_and_a_comparison(tmp_path):
    a, b = (log(tmp_path, name, curve(seed=i)) for i, name in enumerate("ab"))
    text = " ".join(read(report.write([a], tmp_path / "log.html")).text)
    assert "how the training ended is not known" in text or "how the training ended are not in it" in text
    page = read(report.write([f"npu={a}", f"gpu={b}"], tmp_path / "both.html", by="tokens"))
    text = " ".join(page.text)
    assert "npu against gpu" in text
    assert "aligned by tokens" in text
    assert "first divergence" in text
    assert page.images[0].startswith("A: npu; B: gpu.")


def test_fourteen_long_runs_fit_into_two_megabytes(tmp_path):
    paths = [f"run {i} <b>={log(tmp_path, f'r{i}', curve(400, seed=i))}" for i in range(14)]
    read(report.write(paths, tmp_path / "many.html"))


def test_what_does_not_fit_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(report, "MOST", 1000)
    with pytest.raises(RecipeError, match="give fewer sources"):
        report.write([log(tmp_path, "a", curve())], tmp_path / "r.html")
    assert not (tmp_path / "r.html").exists()


def test_the_commands(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    said = CliRunner().invoke(main, ["report", str(run.path)])
    assert said.output == f"wrote {run.path / 'report.html'}\n"
    read(run.path / "report.html")
    a, b = (log(tmp_path, name, curve(seed=i)) for i, name in enumerate("ab"))
    said = CliRunner().invoke(main, ["report", a, b])
    assert said.output == "wrote report.html\n"
    assert CliRunner().invoke(main, ["compare", a, b, "--html", "c.html"]).exit_code == 0
    read(tmp_path / "c.html")
    (tmp_path / "file").write_text("")
    said = CliRunner().invoke(main, ["report", a, "-o", "file/report.html"])
    assert said.exit_code == 2
    assert "-o file/report.html cannot be written" in said.output


def test_recording_a_run_writes_its_report_with_the_verdict_that_was_made(run):
    write_json(
        run.verdict_file,
        {
            "passed": True,
            "judgements": [{"rule": "MINE", "outcome": "pass", "sentence": "as it was judged", "step": None}],
        },
    )
    notebook.record(run)
    page = read(run.path / "report.html")
    assert "as it was judged" in page.text
    assert "report.html" in notebook.Recorded(run)._repr_mimebundle_()["text/plain"]


def test_a_report_never_says_another_verdict_than_the_one_beside_it(run):
    """It is written when a run has ended, before anybody judges; judging then writes it anew."""
    notebook.record(run)
    words = " ".join(read(run.path / "report.html").text)
    assert "has not been judged since its last step" in words
    assert "believed" not in words
    judged = notebook.judge(run, thresholds=["minimum_steps=99"])
    words = " ".join(read(run.path / "report.html").text)
    assert judged.summary in words
    assert "30 steps show no trend" in words


def test_what_hinders_the_report_does_not_hide_how_a_run_ended(run, monkeypatch):
    def full(*args, **more):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(curves, "save", full)
    assert notebook.try_to_record(run) == (
        "Curves and report could not be written: [Errno 28] No space left on device\n"
    )


def test_a_picture_that_cannot_be_drawn_does_not_end_the_watching(run, monkeypatch, capsys):
    update_state(run, state="finished", cause="")
    monkeypatch.setattr(curves.Sheet, "begin", lambda *args, **more: 1 / 0)
    notebook.watch(run)
    assert "could not be drawn (ZeroDivisionError: division by zero)" in capsys.readouterr().out


def test_a_report_of_a_log_says_why_its_training_failed_with_or_without_a_step(tmp_path):
    log = tmp_path / "train.log"
    oom = "(WorkerDict pid=5) RuntimeError: NPU out of memory. Tried to allocate 2.00 GiB <b>\n"
    step = "(TaskRunner pid=1) step:{} - critic/rewards/mean:0.5 - actor/entropy:0.3\n"
    log.write_text("".join(step.format(s) for s in range(1, 13)) + oom)
    html = report.of([log])
    assert "A device has no memory left." in html
    assert "&lt;b&gt;" in html
    assert "its log shows that the training failed" in html
    judged = notebook.judge(log)
    assert not judged.verdict.passed
    assert judged.verdict.judgements[0].rule == "ENDED"
    log.write_text("(TaskRunner pid=1) INFO starting\n" + oom)
    assert "A device has no memory left." in report.of([log])
    with pytest.raises(RecipeError, match="Its text shows why: A device has no memory left"):
        notebook.judge(log)
    log.write_text("".join(step.format(s) for s in range(1, 13)))
    assert "Why it failed" not in report.of([log])


# ------------------------------------------------------------------------------------------------- the live board


def moment(data, **state):
    found = as_metrics(data)
    state = {"state": "running", "recipe": "some/recipe", "cause": ""} | state
    return live.Moment(state, found, int(found.table.index[-1]), 3000, 1.0, 2.0, ("<log>",) * 8)


def test_lights_say_which_rule_fails_and_since_when():
    good = lights.lights(as_metrics(synthetic(20)))
    assert [light.rule for light in good if light.outcome in ("fail", "wait")] == []
    bad = synthetic(20)
    bad.loc[12, "actor/grad_norm"] = np.inf
    bad.loc[9:, "training/rollout_probs_diff_mean"] = 0.5
    found = {light.rule: light for light in lights.lights(as_metrics(bad))}
    assert str(found["NAN"]) == "NAN FAILS at step 12"
    assert found["MISMATCH"].outcome == "fail"
    assert {light.outcome for light in lights.lights(as_metrics(synthetic(0)))} == {"wait"}
    without = as_metrics(synthetic(20).drop(columns="training/rollout_probs_diff_mean"))
    [mismatch] = [light for light in lights.lights(without) if light.rule == "MISMATCH"]
    assert mismatch.outcome == "wait"  # what was not measured is not fine
    html = lights.row([lights.Light('N<A"N', "fail", 'x"><script>', 3)])
    assert "<script>" not in html
    assert 'class="fail"' in html


def test_pace_leaves_out_what_was_not_recorded():
    data = curve(12, **{"perf/throughput": np.r_[np.full(2, 1e4), np.full(10, 1234.4)]})
    data["actor/perf/max_memory_allocated_gb"] = 40.25
    data["actor/perf/max_memory_reserved_gb"] = 0.0
    assert live.pace(as_metrics(data)) == [
        ("seconds/step", "2"),
        ("tokens/s/device", "1,234"),
        ("tokens so far", "1,200"),
        ("memory, peak GiB", "40.2 allocated"),
    ]
    assert live.pace(as_metrics(data[["actor/entropy"]])) == []


def test_the_board_shows_lights_pace_curves_and_log():
    data = synthetic(30)
    data.loc[4, "actor/pg_loss"] = np.nan
    data.loc[5, "actor/pg_loss"] = np.inf
    now = moment(data)
    health = lights.lights(now.metrics)
    html = notebook._moment_html(now, (*curves.Sheet().pair(data), curves.describe(data)), health)
    assert "NAN FAILS at step 5" in html
    assert "seconds/step" in html
    assert html.count("<img") == 2
    assert "&lt;log&gt;" in html
    assert "NAN FAILS" in notebook._moment_text(now, health)


def test_the_dark_picture_is_the_light_one_in_other_colours():
    from io import BytesIO

    from PIL import Image

    data = synthetic(40)
    data.loc[30, "actor/entropy"] = np.inf
    light, dark = curves.Sheet().pair(data, title="x")
    assert light == drawing.png(curves.figure(data, title="x"))
    drawn = drawing.png(curves.figure(data, theme="dark", title="x"))
    pixels = [np.asarray(Image.open(BytesIO(picture)).convert("RGB")) for picture in (dark, drawn)]
    # Two words that touch are one shape where they have one colour; nothing else may differ.
    assert (pixels[0] != pixels[1]).any(axis=2).sum() < 100


def test_a_redraw_of_two_thousand_steps_and_sixty_metrics_is_quick():
    """0.3 s on an idle core is the aim (`scripts/measure.py redraw`); the bound leaves room for a busy machine."""
    now, sheet = moment(synthetic(2000).iloc[:, :60]), curves.Sheet()

    def cost():
        began = time.process_time()
        pages = sheet.pair(now.metrics, title="some/recipe", total_steps=now.steps)
        notebook._moment_html(now, (*pages, curves.describe(now.metrics)), lights.lights(now.metrics))
        return time.process_time() - began

    cost()
    assert median(cost() for _ in range(5)) < 1.0


def test_a_run_that_is_opened_again_gives_the_same_page(run, tmp_path):
    one, two = (report.of_run(open_run(run.path)) for _ in range(2))
    stamp = r"Written [^<]*"
    assert re.sub(stamp, "", one) == re.sub(stamp, "", two)
