"""Comparisons: groups, axes, bands, tables, and where two sources part."""

from __future__ import annotations

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner
from PIL import Image

from recipes import compare, compare_view, params
from recipes.cli import main
from recipes.compare import align, group, line, positions, read, table
from recipes.drawing import THEMES, png
from recipes.errors import RecipeError
from recipes.metrics import as_metrics, write_csv
from recipes.run.directory import create, write_json

REWARD, DIFF = "critic/rewards/mean", "training/rollout_probs_diff_mean"


def curve(steps=30, *, seed=0, reward=0.0, first=1, **columns):
    """A made-up run: a noisy rising reward, an exact entropy, 100 tokens and 2 s a step."""
    draw = np.random.default_rng(seed)
    x = np.arange(steps)
    data = {
        REWARD: 0.3 + 0.02 * x + reward + draw.normal(0, 0.01, steps),
        "actor/entropy": 1.0 - 0.02 * x,
        DIFF: np.full(steps, 1e-3),
        "prompt_length/mean": 100.0 + x % 3,
        "response_length/mean": 200.0 + x,
        "actor/ppo_kl": draw.normal(0, 1e-4, steps),
        "perf/total_num_tokens": np.full(steps, 100.0),
        "timing_s/step": np.full(steps, 2.0),
        "val-core/sums/reward/mean@1": np.where((x + first) % 10 == 0, 0.4 + 0.02 * x, np.nan),
    }
    return pd.DataFrame(data | columns, index=np.arange(first, first + steps))


def log(folder, name, data):
    return str(write_csv(as_metrics(data), folder / f"{name}.csv"))


def run_of(folder, name, data, overrides=()):
    """A run directory as a launch leaves it, with these metrics."""
    composed = params.compose("quickstart/grpo", list(overrides), run_dir=str(folder / name))
    run = create(folder / name, composed.name, {"steps": len(data)})
    (run.path / "recipe.yaml").write_text(json.dumps(params.to_dict(composed.recipe)))
    write_json(run.command_file, {"argv": ["python", "-m", "x", "verl"], "environment": {}, "verl": "0.9.1"})
    write_json(run.state_file, json.loads(run.state_file.read_text()) | {"state": "finished"})
    lines = [
        json.dumps({"step": int(step), "data": {k: v for k, v in row.items() if np.isfinite(v)}})
        for step, row in data.iterrows()
    ]
    run.metrics(1).write_text("\n".join(lines) + "\n")
    return str(run.path)


# ------------------------------------------------------------------------------------------------- names and groups


def test_sources_have_names_that_differ(tmp_path):
    for folder in "ab":
        (tmp_path / folder).mkdir()
    paths = [log(tmp_path / folder, "run", curve()) for folder in "ab"]
    assert [s.name for s in read(paths)] == ["a/run.csv", "b/run.csv"]
    assert [s.name for s in read([f"npu={paths[0]}", f"npu={paths[1]}"])] == ["npu", "npu (2)"]
    shutil.copy(paths[0], tmp_path / "x=y.csv")
    assert read([str(tmp_path / "x=y.csv"), paths[0]])[0].name == "x=y.csv"


def test_what_cannot_be_compared_is_refused_with_a_sentence(tmp_path):
    one = log(tmp_path, "one", curve())
    for texts, words in (
        ([one], "two runs or logs at least"),
        ([one, one], "given twice"),
        ([one, str(tmp_path / "none")], "does not exist"),
        ([one, log(tmp_path, "empty", curve(0))], "nothing to compare"),
    ):
        with pytest.raises(RecipeError, match=words):
            compare.compare(texts)
    with pytest.raises(RecipeError, match="must be one of step, tokens, time"):
        compare.compare([one, log(tmp_path, "two", curve())], by="epoch")


def test_runs_that_differ_in_their_seed_alone_are_one_group(tmp_path):
    paths = [
        run_of(tmp_path, "one", curve(seed=1), ["trainer.seed=1"]),
        run_of(tmp_path, "two", curve(seed=2), ["trainer.seed=2"]),
        run_of(tmp_path, "other", curve(seed=2), ["trainer.seed=1", "optimizer.lr=1e-3"]),
    ]
    groups = group(read(paths))
    assert [len(one.sources) for one in groups] == [2, 1]
    assert str(groups[0]) == "quickstart/grpo: seeds 1, 2; mean, band from lowest to highest"
    assert groups[1].name == "other"
    assert len(group(read(paths[:2]))) == 2  # two alone are compared with each other
    found = compare.compare(paths)
    [(letter, parts)] = found.recipes
    assert letter == "B"
    [recipe] = [part for part in parts if part.name == "recipe"]
    assert list(recipe.differing) == ["optimizer.lr"]
    assert "optimizer.lr" in compare_view.text(found)
    assert "optimizer.lr" in compare_view.tables(found)
    assert not found.alignment


def test_groups_of_one_recipe_are_told_apart_by_their_settings(tmp_path):
    made = [(rate, seed) for rate in ("1e-4", "2e-4") for seed in (1, 2)]
    paths = [
        run_of(tmp_path, f"{rate}-{seed}", curve(5, seed=seed), [f"trainer.seed={seed}", f"optimizer.lr={rate}"])
        for rate, seed in made
    ]
    names = [one.name for one in group(read(paths))]
    assert names == ["quickstart/grpo with optimizer.lr=0.0001", "quickstart/grpo with optimizer.lr=0.0002"]


def test_a_label_makes_a_group_of_logs(tmp_path):
    a, b, c = (log(tmp_path, name, curve(seed=i)) for i, name in enumerate("abc"))
    assert [one.name for one in group(read([f"npu={a}", f"npu={b}", f"gpu={c}"]))] == ["npu", "gpu"]
    assert len(group(read([a, b, c]))) == 3
    with pytest.raises(RecipeError, match="cannot be told apart"):
        group(read([log(tmp_path, f"n{i}", curve(3)) for i in range(compare.MOST + 1)]))


# ------------------------------------------------------------------------------------------------- axes and lines


def test_positions_by_step_tokens_and_time(tmp_path):
    data = curve(4, first=5)
    data.loc[7, "timing_s/step"] = np.nan
    [source] = read([log(tmp_path, "one", data)])
    assert positions(source, "step").tolist() == [5, 6, 7, 8]
    assert positions(source, "tokens").tolist() == [100, 200, 300, 400]
    assert positions(source, "time").tolist() == [2, 4, 4, 6]
    [bare] = read([log(tmp_path, "bare", data.drop(columns="perf/total_num_tokens"))])
    with pytest.raises(RecipeError, match=r"no perf/total_num_tokens\. Use --by step"):
        positions(bare, "tokens")


def test_a_band_is_the_lowest_and_highest_as_far_as_all_go(tmp_path):
    paths = [
        log(tmp_path, name, curve(n, **{REWARD: np.full(n, v)})) for name, n, v in (("a", 10, 0.2), ("b", 12, 0.6))
    ]
    one = compare.Group("both", tuple(read(paths)))
    found = line(one, REWARD)
    assert found is not None
    assert found.x.tolist() == list(range(1, 11))
    assert (set(found.low), set(found.high), found.sources) == ({0.2}, {0.6}, 2)
    assert found.mean == pytest.approx(0.4)
    assert line(one, "actor/kl_loss") is None


def test_a_spike_of_one_seed_survives_the_other_axis(tmp_path):
    spike = curve(20, **{REWARD: np.where(np.arange(20) == 7, 9.0, 0.5)})
    slow = curve(20, **{REWARD: np.full(20, 0.5), "perf/total_num_tokens": np.full(20, 137.0)})
    one = compare.Group("both", tuple(read([log(tmp_path, "a", spike), log(tmp_path, "b", slow)])))
    found = line(one, REWARD, "tokens")
    assert found is not None
    assert found.high.max() == 9.0
    assert found.x[found.high.argmax()] == 800
    assert found.x.min() == 137
    assert found.x.max() == 2000


def test_the_table_ends_where_the_shortest_ends(tmp_path):
    a = curve(20, **{REWARD: np.arange(20.0)})
    b = curve(40, **{REWARD: np.arange(40.0) + 1})
    rows, end = table(group(read([log(tmp_path, "a", a), log(tmp_path, "b", b)])))
    assert end == 20
    reward = rows[0]
    assert reward.key == REWARD
    assert [value.last for value in reward.values] == [17, 18]  # the mean of the last five of twenty
    assert [value.mean for value in reward.values] == [9.5, 10.5]
    assert reward.difference(1) == (1.0, pytest.approx(1 / 17))
    assert reward.apart(1) is None
    [validation] = [row for row in rows if row.key.startswith("val-")]
    assert validation.values[1].last == pytest.approx(0.4 + 0.02 * 19)


def test_bands_that_do_not_touch_are_apart(tmp_path):
    paths = [f"{'ab'[i // 2]}={log(tmp_path, f'r{i}', curve(seed=i, reward=0.5 * (i // 2)))}" for i in range(4)]
    rows, _ = table(group(read(paths)))
    told = {row.key: row.apart(1) for row in rows}
    assert told[REWARD] is True
    assert told["actor/entropy"] is False
    assert "apart" in compare_view.text(compare.compare(paths))


# ------------------------------------------------------------------------------------------------- step by step


def pair(tmp_path, a, b):
    return read([log(tmp_path, "a", a), log(tmp_path, "b", b)])


def test_equal_sources_never_part(tmp_path):
    found = align(*pair(tmp_path, curve(), curve()))
    assert {one.key for one in found} == {REWARD, DIFF, "actor/entropy", "actor/ppo_kl"}
    assert [(one.unequal, one.diverged) for one in found] == [(None, None)] * len(found)


def test_noise_is_no_divergence_and_a_shift_is(tmp_path):
    noisy = {one.key: one for one in align(*pair(tmp_path, curve(seed=1), curve(seed=2)))}[REWARD]
    assert (noisy.unequal, noisy.diverged) == (1, None)
    shifted = curve(seed=2)
    shifted.loc[12:, REWARD] += 0.2
    parted = {one.key: one for one in align(*pair(tmp_path, curve(seed=1), shifted))}[REWARD]
    assert parted.diverged == 12
    assert parted.tolerance == pytest.approx(3 * 0.01 * np.sqrt(2), rel=0.6)
    rows = parted.rows(12)
    assert {10, 11, 12, 13} <= {step for step, *_ in rows}
    assert len(rows) <= 14
    _, a, b, delta, relative = rows[-1]
    assert (b - a, delta / a) == (pytest.approx(delta), pytest.approx(relative))


QUICKSTARTS = Path(__file__).parent / "data" / "verdict"


@pytest.mark.parametrize(
    ("one", "other", "parts"),
    [
        ("quickstart", "quickstart_lr_1e-3", True),
        ("quickstart", "quickstart_lr_5e-5", True),
        ("quickstart", "quickstart_seed_2", False),
        ("quickstart_seed_3", "quickstart_seed_2", False),
        ("quickstart_seed_3", "quickstart_seed_5", False),
    ],
)
def test_real_runs_part_in_reward_where_one_goes_astray_whichever_is_named_first(one, other, parts):
    """The rewards of runs that differ in their seed alone do not part; a learning rate of ten or of half does it."""
    sources = read([str(QUICKSTARTS / f"{name}.csv") for name in (one, other)])
    found = [align(*pair, keys=(REWARD,))[0].diverged for pair in (sources, sources[::-1])]
    assert found[0] == found[1]
    assert (found[0] is not None) == parts


def test_a_single_outlier_is_no_divergence_unless_one_is_asked_for(tmp_path):
    odd = curve(seed=1)
    odd.loc[9, REWARD] += 5
    a, b = pair(tmp_path, curve(seed=1), odd)
    [one] = align(a, b, keys=(REWARD,))
    assert (one.unequal, one.diverged, one.largest) == (9, None, (9, pytest.approx(5)))
    [one] = align(a, b, keys=(REWARD,), tolerance=1e-9, times=1)
    assert one.diverged == 9


def test_a_value_that_is_not_finite_differs_from_one_that_is(tmp_path):
    a, b = pair(tmp_path, curve(), curve())
    lost = b.metrics.table.copy()
    lost.loc[8:, REWARD] = np.inf
    [one] = align(a, dataclasses.replace(b, metrics=as_metrics(lost)), keys=(REWARD,))
    assert (one.unequal, one.diverged) == (8, 8)
    assert np.isinf(one.delta[-1])
    json.dumps(one.to_dict(), allow_nan=False)


def test_too_few_steps_are_not_judged_and_an_exact_metric_is_held_to_rounding(tmp_path):
    [one] = align(*pair(tmp_path, curve(4), curve(4)), keys=(REWARD,))
    assert one.tolerance is None
    assert "fewer than 6 steps" in one.to_dict()["tolerance_source"]
    a = curve(**{DIFF: np.zeros(30)})
    b = curve(**{DIFF: np.full(30, 1e-9)})
    [one] = align(*pair(tmp_path, a, b), keys=(DIFF,))
    assert (one.unequal, one.diverged, one.why) == (1, 1, "rounding")


def test_it_says_when_equality_is_not_to_be_expected(tmp_path):
    one = run_of(tmp_path, "one", curve(), ["trainer.seed=1"])
    for name, seed, words in (("two", 2, "The seeds differ (1, 2)"), ("same", 1, "full_determinism is not on")):
        found = compare.compare([one, run_of(tmp_path, name, curve(), [f"trainer.seed={seed}"])])
        assert words in compare_view.text(found)
        assert "both saw the same prompts" in compare_view.text(found)
    prompts = curve(**{"prompt_length/mean": np.arange(30.0)})
    said = " ".join(compare.sampling(*pair(tmp_path, curve(), prompts)))
    assert "A log does not tell its seed" in said
    assert "differs from step 1 on" in said
    assert "Only b.csv has step 31–35" in " ".join(compare.sampling(*pair(tmp_path, curve(), curve(35))))


# ------------------------------------------------------------------------------------------------- what is shown


@pytest.mark.parametrize("by", ["step", "tokens", "time"])
def test_the_page_shows_every_group_in_every_panel(tmp_path, by):
    paths = [f"{'ab'[i // 2]}={log(tmp_path, f'r{i}', curve(seed=i))}" for i in range(4)]
    found = compare.compare(paths, by=by)
    fig = compare_view.figure(found)
    said = " | ".join(artist.get_gid() or "" for artist in fig.artists)
    for words in (
        "Reward per response",
        "▬ A",
        "▬ B",
        "a: 2 runs",
        {"step": "step", "tokens": "k tokens", "time": "seconds"}[by],
    ):
        assert words in said
    assert len(fig.axes) == 8
    assert len(fig.axes[0].lines) >= 4
    assert len(fig.axes[0].collections) >= 2  # the bands
    assert "nobody recorded it" in said  # the gradient norm
    words = compare_view.describe(found)
    assert "Gradient norm: not recorded" in words
    assert "Reward per response (critic/rewards/mean): A 0.3" in words


def test_text_from_outside_is_escaped(tmp_path):
    evil = "<script>alert(1)</script>"
    paths = [f"{evil}x={log(tmp_path, 'a', curve())}", log(tmp_path, "b", curve(seed=3))]
    with pytest.raises(RecipeError):  # a label holds no slash: this is a path that does not exist
        compare.compare(paths)
    evil = "<b>img"
    shown = compare_view.Compared(compare.compare([f"{evil}={log(tmp_path, 'a', curve())}", paths[1]]))
    for part in (shown, shown.numbers(), shown.recipes(), shown.steps(), shown.rollouts()):
        assert evil not in part._repr_mimebundle_()["text/html"]
    assert "&lt;b&gt;img" in shown.numbers().html
    assert "holds no rollouts" in shown.rollouts().text or "is no dump" in shown.rollouts().text


def test_the_command_writes_pictures_and_numbers(tmp_path):
    a, b = (log(tmp_path, name, curve(seed=i, reward=0.3 * i)) for i, name in enumerate("ab"))
    said = CliRunner().invoke(main, ["compare", f"npu={a}", f"gpu={b}", "-o", str(tmp_path / "out"), "--json"])
    assert said.exit_code == 0, said.output
    told = json.loads((tmp_path / "out/compare.json").read_text())
    assert told == json.loads(said.stdout)
    assert [one["name"] for one in told["groups"]] == ["npu", "gpu"]
    assert told["alignment"][0]["first_divergence"] == 1
    for theme, name in (("light", "compare.png"), ("dark", "compare-dark.png")):
        with Image.open(tmp_path / "out" / name) as image:
            assert image.width == 1920
            surface = THEMES[theme].surface
            assert "#{:02x}{:02x}{:02x}".format(*image.convert("RGB").getpixel((1, 1))) == surface
    with (tmp_path / "out/alignment.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["exceeds"] for row in rows if row["key"] == REWARD} == {"1"}
    with (tmp_path / "out/compare.csv").open() as file:
        assert {row["group"] for row in csv.DictReader(file)} == {"A", "B"}
    said = CliRunner().invoke(main, ["compare", a])
    assert said.exit_code == 2
    assert "two runs or logs at least" in said.output


def test_very_many_steps_are_thinned_and_keep_their_spike(tmp_path):
    n = 3000
    spiky = curve(n, **{"timing_s/step": np.where(np.arange(n) == 1234, 500.5, 2.0)})
    found = compare.compare([log(tmp_path, "a", spiky), log(tmp_path, "b", curve(n, seed=1))])
    fig = compare_view.figure(found)
    [panel] = [ax for ax in fig.axes if any(500.5 in line.get_ydata() for line in ax.lines)]
    assert max(len(line.get_xdata()) for line in panel.lines) < 1500
    assert len(png(fig)) > 10_000


def test_real_metrics_compare_with_themselves(tmp_path):
    real = Path(__file__).parent / "data/metrics/one_run"
    found = compare.compare([f"lines={real / 'metrics.jsonl'}", f"console={real / 'train.log'}"])
    assert all(one.diverged is None for one in found.alignment)
    assert found.rows
