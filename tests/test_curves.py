"""Curves: every number is where it belongs, nothing is dropped in silence, and the page can be read."""

import math
import subprocess
import sys
import time
import xml.etree.ElementTree as ET
from io import BytesIO
from itertools import combinations, pairwise
from pathlib import Path
from statistics import median

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from recipes import curves, drawing
from recipes.curves import NEEDS, describe, figure, headline, save
from recipes.drawing import THEMES, apart, png
from recipes.metrics import Broken, Metrics, as_metrics, read_jsonl
from recipes.series import BUCKETS, holes, number, ranges, series, thin

REAL = Path(__file__).parent / "data/metrics/verl_0.9.1_three_steps.jsonl"
VALIDATION = "val-core/show_your_work/reward/mean@1"


def synthetic(steps: int = 50, *, first: int = 1, seed: int = 0) -> pd.DataFrame:
    """A made-up run with the keys of the real one: reward .36 to .95, response length 17 to 31, validation by tens."""
    draw = np.random.default_rng(seed)
    index = np.arange(first, first + steps)
    progress = 1 - np.exp(-np.arange(steps) / steps * 4)
    real = read_jsonl(REAL).table
    table = pd.DataFrame({key: np.resize(real[key], steps) for key in real}, index=index)
    table["critic/rewards/mean"] = np.clip(0.36 + 0.6 * progress + draw.normal(0, 0.04, steps), 0, 1)
    table["critic/rewards/min"], table["critic/rewards/max"] = 0.0, 1.0
    table["response_length/mean"] = 17 + 14 * progress + draw.normal(0, 0.5, steps)
    table["response_length/min"] = table["response_length/mean"] - 8
    table["response_length/max"] = table["response_length/mean"] + 14
    table["actor/entropy"] = 0.9 - 0.7 * progress
    table["actor/grad_norm"] = np.exp(draw.normal(-0.3, 0.3, steps))
    table["actor/ppo_kl"] = 10 ** draw.uniform(-6, -3, steps)
    table["timing_s/step"] = table.filter(like="timing_s/").drop(columns="timing_s/step").sum(axis=1) + 0.1
    table[VALIDATION] = np.where(index % 10 == 0, 0.36 + 0.59 * progress, np.nan)
    return table


def words(fig) -> list[str]:
    """Every text on the page."""
    said = [artist.get_gid().removeprefix("text: ") for artist in fig.artists if artist.get_gid()]
    return [text for line in said for text in line.split(" | ")]


def lines(fig, panel: int):
    """(x, y) of the lines of the n-th axes, without the rules under them and the marks that stand at a fixed height."""
    ax = fig.axes[panel]
    above = [line for line in ax.lines if line.get_zorder() > 1]
    return [line.get_xydata() for line in above if line.get_transform() == ax.transData]


def crosses(fig) -> dict[int, list[float]]:
    """Axes number → steps that carry a cross."""
    marked = {}
    for i, ax in enumerate(fig.axes):
        for line in ax.lines:
            if line.get_marker() == "x":
                marked.setdefault(i, []).extend(line.get_xdata())
    return marked


REWARD, DIFF, MATCH, ENTROPY, NORM, KL, CLIP, LENGTH, CUT, TIME, RATE = range(11)


# --- what is drawn ---


def test_the_page_has_six_panels_with_their_units_and_the_names_verl_writes():
    said = words(figure(synthetic(), title="Quickstart", total_steps=50))
    for text in (
        "Quickstart",
        "step 50 of 50",
        "Reward per response",
        f"critic/rewards/mean · {VALIDATION}",
        "Trainer vs rollout: mean probability difference",
        "training/rollout_probs_diff_mean",
        "1 − rollout_actor_probs_pearson_corr · |rollout_corr/kl|",
        "Entropy, nats per token",
        "actor/entropy",
        "Gradient norm · actor/grad_norm",
        "KL, nats per token",
        "Clip fraction of tokens · actor/pg_clipfrac",
        "Response length, tokens",
        "Share cut at the limit · response_length/clip_ratio",
        "Time per step, seconds",
        "Tokens per second and device · perf/throughput",
        "0.005 ▼ normal",
        "0.01 ▲ problem",
    ):
        assert text in said


def test_reward_shows_each_step_the_mean_of_five_and_validation():
    table = synthetic()
    points, smooth, validation = lines(figure(table), REWARD)
    reward = table["critic/rewards/mean"]
    np.testing.assert_array_equal(points[:, 1], reward)
    np.testing.assert_allclose(smooth[4:, 1], reward.rolling(5).mean()[4:])
    np.testing.assert_allclose(smooth[:4, 1], reward.expanding().mean()[:4])
    np.testing.assert_array_equal(validation, table[VALIDATION].dropna().reset_index().to_numpy())
    assert {f"{number(smooth[-1, 1])} mean of 5", f"{number(validation[-1, 1])} validation"} <= set(
        words(figure(table))
    )


def test_reward_of_an_older_key_and_outside_zero_and_one():
    table = synthetic().drop(columns=["critic/rewards/mean", "critic/rewards/min", "critic/rewards/max"])
    table["critic/score/mean"], table["critic/score/min"], table["critic/score/max"] = 3.0, -2.0, 7.0
    fig = figure(table)
    assert any(text.startswith("critic/score/mean") for text in words(fig))
    low, high = fig.axes[REWARD].get_ylim()
    assert low < -2
    assert high > 7


def test_several_validation_sets_are_told_apart_and_the_rest_is_counted():
    table = synthetic().drop(columns=VALIDATION)
    for name in ("a", "b", "c", "d"):
        table[f"val-core/{name}/acc/best@4/mean"] = 0.1
        table[f"val-core/{name}/acc/mean@4"] = 0.5
    said = words(figure(table))
    assert "critic/rewards/mean · val-core/a/acc/mean@4 +7 more" in said
    assert {"0.5 a", "0.5 b", "0.5 c"} <= set(said)


def test_a_band_that_never_moves_is_not_painted_and_one_that_moves_is():
    fig = figure(synthetic())
    painted = [len(fig.axes[i].collections) for i in (REWARD, LENGTH)]
    assert painted == [0, 1]
    assert {"0 min", "1 max"} <= set(words(fig))


def test_a_difference_of_exactly_zero_is_a_triangle_at_the_foot_of_the_logarithmic_axis():
    table = synthetic()
    table["training/rollout_probs_diff_mean"] = 0.0
    fig = figure(table)
    (marks,) = [line for line in fig.axes[DIFF].lines if line.get_marker() == "v"]
    assert marks.get_xdata().tolist() == table.index.tolist()
    assert "0 mean" in words(fig)


def test_a_kl_of_zero_says_why():
    fig = figure(read_jsonl(REAL))
    assert "ppo_mini_batch_size = train_batch_size" in words(fig)
    assert "ppo_mini_batch_size = train_batch_size" not in words(figure(synthetic()))


def test_the_size_of_a_signed_kl_is_drawn_where_it_is_negative():
    table = synthetic()
    table["actor/ppo_kl"] = -1e-4
    (line,) = lines(figure(table), KL)
    assert set(line[:, 1]) == {1e-4}


def test_the_time_stack_adds_up_to_the_step():
    steps, parts = curves.time_parts(as_metrics(synthetic()))
    assert list(parts) == ["gen", "old_log_prob", "adv", "update_actor", "update_weights", "rest"]
    np.testing.assert_allclose(sum(parts.values()), synthetic()["timing_s/step"])
    np.testing.assert_allclose(parts["rest"], 0.1)
    assert len(steps) == 50


def test_a_stage_that_ran_in_few_steps_takes_no_time_in_the_others():
    table = synthetic()
    table["timing_s/save_checkpoint"] = np.where(table.index == 20, 1.5, np.nan)
    table.loc[20, "timing_s/step"] += 1.5
    steps, parts = curves.time_parts(as_metrics(table))
    assert parts["save_checkpoint"][steps == 20] == 1.5
    assert parts["save_checkpoint"].sum() == 1.5
    assert "1.5 checkpoint" in words(figure(table))


def test_a_slow_first_step_does_not_flatten_the_others():
    fig = figure(read_jsonl(REAL))  # 30.9 s, then 4.7 and 4.4
    assert fig.axes[TIME].get_ylim()[1] < 7
    assert "▲ step 1: 30.9 s" in words(fig)


def test_a_gradient_norm_over_decades_is_logarithmic_and_a_quiet_one_is_not():
    assert figure(read_jsonl(REAL)).axes[NORM].get_yscale() == "log"
    assert figure(synthetic()).axes[NORM].get_yscale() == "linear"


def test_a_constant_is_not_blown_up_into_noise():
    table = synthetic()
    table["actor/entropy"] = 4.0 + np.resize([0, 1e-9], len(table))
    low, high = figure(table).axes[ENTROPY].get_ylim()
    assert high - low > 0.1
    assert low < 4.0 < high


# --- what is not there ---


@pytest.mark.parametrize(
    ("drop", "needs"),
    [
        ("training/rollout_probs_diff_mean", "actor_rollout_ref.rollout.calculate_log_probs=True"),
        ("training/rollout_probs_diff_mean", "algorithm.rollout_correction.bypass_mode=False"),
        ("actor/entropy", "algorithm.rollout_correction.bypass_mode=False"),
    ],
)
def test_an_empty_panel_says_which_parameter_turns_it_on(drop, needs):
    lines = set(curves._folded(needs, 40))  # broken where it would leave its panel
    assert not lines <= set(words(figure(synthetic())))
    assert lines <= set(words(figure(synthetic().drop(columns=drop))))


def test_missing_lines_of_a_panel_name_their_parameter_in_the_margin():
    said = " ".join(words(figure(synthetic().drop(columns=VALIDATION))))
    assert "test_freq=10" in said
    assert "use_kl_loss=True" in said
    table = synthetic().assign(**{"actor/kl_loss": 0.01})
    assert "use_kl_loss=True" not in " ".join(words(figure(table)))


def test_a_key_that_every_step_should_have_is_missed_by_name():
    said = words(figure(synthetic().drop(columns="actor/grad_norm")))
    assert "actor/grad_norm at every training step" in said


def test_hints_name_real_settings_of_verl():
    """Against verl's own composed configuration, where verl is installed."""
    spec = pytest.importorskip("importlib.util").find_spec("verl")
    if spec is None:
        pytest.skip("verl is not installed")
    from omegaconf import OmegaConf

    path = Path(spec.submodule_search_locations[0]) / "trainer/config/_generated_ppo_megatron_trainer.yaml"
    config = OmegaConf.load(path)
    missing = object()
    for hint in {hint for hints in NEEDS.values() for hint in hints}:
        assert OmegaConf.select(config, hint.split("=")[0], default=missing) is not missing, hint


def test_before_the_first_training_step_panels_wait_instead_of_asking_for_parameters():
    only_validation = as_metrics(pd.DataFrame({VALIDATION: [0.36]}, index=[0]))
    for metrics in (only_validation, synthetic().iloc[:0], read_jsonl("nothing here")):
        said = words(figure(metrics, total_steps=50))
        assert "waiting for the first training step" in said
        assert not any("needs" in text for text in said)
    assert "0.36 validation" in words(figure(only_validation))
    assert "no step yet" in words(figure(read_jsonl("nothing here")))


@pytest.mark.parametrize("steps", [0, 1, 2, 3])
@pytest.mark.parametrize("theme", list(THEMES))
def test_the_first_steps_can_be_drawn(steps, theme, recwarn):
    table = synthetic().iloc[:steps]
    for draw in (figure, headline):
        assert png(draw(table, theme=theme, total_steps=50)).startswith(b"\x89PNG")
    assert not [str(w.message) for w in recwarn]


def test_one_step_is_a_dot_because_a_line_of_one_point_cannot_be_seen():
    ax = figure(synthetic().iloc[:1]).axes[ENTROPY]
    assert [line.get_marker() for line in ax.lines if len(line.get_xdata()) == 1] == ["None", "o"]


# --- what is not finite ---


def broken_run() -> Metrics:
    """Rewards go on, the trainer's numbers are null from step 12."""
    table = synthetic()
    lost = ["actor/entropy", "actor/ppo_kl", "actor/pg_loss", "training/rollout_probs_diff_mean"]
    table.loc[12:, lost] = np.nan
    return Metrics(table, {key: tuple(range(12, 51)) for key in lost})


def test_every_non_finite_step_has_a_cross_and_a_sentence():
    fig = figure(broken_run())
    assert crosses(fig) == {panel: list(range(12, 51)) for panel in (DIFF, ENTROPY, KL)}
    assert words(fig).count("not finite at steps 12–50") == 3


def test_a_non_finite_value_outside_the_panels_is_told_at_the_top():
    assert "Not finite, not drawn here: actor/pg_loss." in words(figure(broken_run()))


def test_a_line_is_not_drawn_across_a_non_finite_value():
    table = synthetic()
    table.loc[30, "actor/entropy"] = np.nan
    (line,) = lines(figure(Metrics(table, {"actor/entropy": (30,)})), ENTROPY)
    assert np.isnan(line).any(axis=1).sum() == 1
    (whole,) = lines(figure(table), ENTROPY)  # merely absent at 30
    assert not np.isnan(whole).any()


def test_two_lines_of_a_panel_that_are_lost_at_different_steps_are_named():
    table = synthetic().assign(**{"actor/kl_loss": 0.01})
    fig = figure(Metrics(table, {"actor/ppo_kl": (3,), "actor/kl_loss": (4, 9)}))
    assert {"ppo_kl not finite at step 3", "kl_loss not finite at steps 4, 9"} <= set(words(fig))


def test_a_run_that_was_never_finite_shows_crosses_and_no_scale():
    table = synthetic()[["actor/entropy", "actor/grad_norm"]] * np.nan
    fig = figure(Metrics(table, {key: tuple(table.index) for key in table}))
    assert set(crosses(fig)) == {ENTROPY, NORM}
    assert not fig.axes[ENTROPY].collections  # no rules across the axes: they would scale nothing
    png(fig)


def test_lines_of_the_file_that_could_not_be_read_are_told_at_the_top():
    metrics = Metrics(synthetic(), broken=(Broken(7, "x"), Broken(9, "y"), Broken(9, "z")))
    assert "Unreadable in the metrics file: line 7, 9." in words(figure(metrics))


# --- resumed and long runs ---


def test_a_part_of_the_run_that_is_missing_leaves_a_hole():
    table = synthetic(60, first=61).drop(index=range(75, 86))
    fig = figure(table, total_steps=200)
    (line,) = lines(fig, ENTROPY)
    at = int(np.flatnonzero(np.isnan(line[:, 0]))[0])
    assert (line[at - 1, 0], line[at + 1, 0]) == (74, 86)
    low, high = fig.axes[ENTROPY].get_xlim()
    assert 58 < low < 61
    assert high > 200
    png(fig)


def test_validation_every_ten_steps_has_no_holes():
    s = series(as_metrics(synthetic()), VALIDATION)
    assert not holes(s).any()


def test_thinning_keeps_the_ends_and_every_spike():
    values = np.zeros(10_000)
    values[[1_234, 7_777]] = 5.0, -5.0
    kept = thin(values, buckets=100)
    assert {0, 1_234, 7_777, 9_999} <= set(kept)
    assert len(kept) <= 202
    assert thin(np.arange(150.0), buckets=100).tolist() == list(range(150))


def test_a_spike_of_one_step_in_two_thousand_is_on_the_page():
    table = synthetic(2000)
    table.loc[1337, "actor/grad_norm"] = 9.0
    raw, mean = lines(figure(table), NORM)
    assert 9.0 in raw[raw[:, 0] == 1337, 1]
    assert len(raw) <= 2 * BUCKETS + 2
    assert mean[:, 1].max() < 3


def test_a_redraw_of_two_thousand_steps_costs_hardly_more_than_one_of_fifty():
    def cost(metrics: Metrics) -> float:
        start = time.process_time()
        png(figure(metrics))
        return time.process_time() - start

    short, long = as_metrics(synthetic()), as_metrics(synthetic(2000))
    cost(short)
    ratio = median(cost(long) for _ in range(5)) / median(cost(short) for _ in range(5))
    assert ratio < 2.5


def test_a_page_drawn_over_another_is_the_page_drawn_by_itself():
    """Whatever run was on it before: a logarithmic axis, crosses, an empty panel, another span of steps."""
    sheet, everything = curves.Sheet(), [run[1:] for run in all_kinds_of_runs()]
    alone = [curves.Sheet().pair(table, **options) for table, options in everything]
    assert [sheet.pair(table, **options) for table, options in everything] == alone
    assert [sheet.pair(table, **options) for table, options in reversed(everything)] == alone[::-1]


def test_a_page_that_could_not_be_drawn_leaves_nothing_on_the_next(monkeypatch):
    sheet, table = curves.Sheet(), synthetic(20)
    fine = sheet.pair(table)
    with monkeypatch.context() as broken:
        broken.setattr(curves, "_time", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            sheet.pair(table)
    assert sheet.pair(table) == fine


# --- the words and numbers ---


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.95312, "0.953"),
        (17.0, "17"),
        (1155.4, "1155"),
        (1.1003e-05, "1.1e-5"),
        (1e-5, "1e-5"),
        (-2.3e-6, "−2.3e-6"),
        (0.0012345, "0.00123"),
        (0.00099999, "0.001"),
        (99.96, "100"),
        (250_000, "2.5e5"),
    ],
)
def test_numbers_are_written_as_people_write_them(value, text):
    assert number(value) == text


def test_ranges_of_steps():
    assert ranges([12]) == "12"
    assert ranges([1, 2, 3, 7, 9, 10]) == "1–3, 7, 9–10"
    assert ranges([1, 3, 5, 7, 9]) == "1, 3, 5 and 2 more"


def test_labels_are_pushed_apart_and_stay_below_the_top():
    assert apart([0.2, 0.5, 0.9], 0.1, 0, 1) == [0.2, 0.5, 0.9]
    moved = apart([0.94, 0.95, 0.95], 0.1, 0, 1)
    assert moved == pytest.approx([0.8, 0.9, 1.0])
    assert apart([0.0, 0.0], 0.1, 0.3, 1) == pytest.approx([0.3, 0.4])


def placed(monkeypatch, draw, *args, **kwargs) -> list[tuple[str, np.ndarray, np.ndarray]]:
    """(text, lower left, upper right) of every text on the page, in inches."""
    pages = []
    with monkeypatch.context() as patch:
        patch.setattr(drawing.Page, "print", lambda page, **_: pages.append(page))
        draw(*args, **kwargs)
    boxes = []
    for word in (word for words in pages[0].words.values() for word in words if word.text.strip()):
        vertices, codes = word.outline()
        inked = vertices[codes != 79]  # a path closes each letter with a point that is not drawn
        boxes.append((word.text, inked.min(axis=0), inked.max(axis=0)))
    return boxes


def all_kinds_of_runs():
    yield (
        "whole",
        synthetic(),
        {"title": "A title as long as anybody would write it for one run, or so", "total_steps": 50},
    )
    yield "one step", synthetic().iloc[:1], {"total_steps": 50}
    yield "long", synthetic(2000), {"total_steps": 12_000}
    yield "real", read_jsonl(REAL), {}
    yield "broken", Metrics(broken_run().table, broken_run().nonfinite, (Broken(7, "x"),)), {"title": "Broken"}
    yield "broken, untitled", broken_run(), {}
    yield "no validation", synthetic().drop(columns=VALIDATION), {}
    yield "empty", read_jsonl("nothing here"), {"title": "Empty"}
    yield "nothing but a step", pd.DataFrame({"training/global_step": [1.0]}, index=[1]), {}
    yield "slow", synthetic().assign(**{f"timing_s/{s}": 1234.5 for s in curves.STAGES if s != "rest"}), {}


@pytest.mark.parametrize(
    ("table", "options"), [run[1:] for run in all_kinds_of_runs()], ids=[r[0] for r in all_kinds_of_runs()]
)
@pytest.mark.parametrize(("draw", "height"), [(figure, 9.4), (headline, 3.2)])
def test_no_text_runs_off_the_page_or_into_another(monkeypatch, draw, height, table, options):
    page = placed(monkeypatch, draw, table, **options)
    for text, low, high in page:
        assert (low >= 0).all(), text
        assert (high <= [9.6, height]).all(), text
    for (a, a_low, a_high), (b, b_low, b_high) in combinations(page, 2):
        assert not ((a_low < b_high) & (b_low < a_high)).all(), (a, b)


def test_describe_says_each_panel_in_words_from_first_to_last():
    table = synthetic()
    text = describe(table)
    assert text.startswith("Steps 1 to 50. Reward: mean of five steps ")
    first, last = table["critic/rewards/mean"].iloc[:5].mean(), table["critic/rewards/mean"].iloc[-5:].mean()
    assert f"mean of five steps {number(first)} → {number(last)}; validation" in text
    assert "KL: to the old policy" in text
    assert "to the reference not recorded, needs actor_rollout_ref.actor.use_kl_loss=True" in text
    assert "Entropy: nats per token 0.9 → " in text
    for head in ("Trainer vs rollout:", "Response length:", "Time:"):
        assert head in text


def test_describe_tells_what_is_not_finite_and_what_is_not_there():
    last = number(synthetic().at[11, "actor/entropy"])
    assert f"nats per token 0.9 → {last} (not finite at steps 12–50)" in describe(broken_run())
    assert describe(read_jsonl("nothing here")) == "No step has been recorded yet."


# --- the look ---


def _linear_rgb(color: str) -> np.ndarray:
    c = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def _contrast(a: str, b: str) -> float:
    """WCAG 2 contrast ratio."""
    light, dark = sorted((float(_linear_rgb(c) @ [0.2126, 0.7152, 0.0722]) for c in (a, b)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# Machado, Oliveira and Fernandes 2009, severity 1, on linear RGB.
VISIONS = {
    "all colours": np.eye(3),
    "no red": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "no green": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "no blue": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}


def _lab(color: str, vision: np.ndarray) -> np.ndarray:
    rgb = np.clip(vision @ _linear_rgb(color), 0, 1)
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ rgb
    f = np.cbrt(np.maximum(xyz / [0.9505, 1.0, 1.089], 0.008856))
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_text_and_lines_stand_out_from_the_surface(theme):
    for color in (theme.text, theme.muted, theme.first, theme.second, theme.alarm):  # all of these are text too
        assert _contrast(color, theme.surface) >= 4.5, color
    for color in theme.stages:
        assert _contrast(color, theme.surface) >= 3, color


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_lines_of_one_panel_differ_for_every_kind_of_eye(theme, vision):
    for a, b in combinations((theme.first, theme.second, theme.muted), 2):
        distance = np.linalg.norm(_lab(a, VISIONS[vision]) - _lab(b, VISIONS[vision]))
        assert distance >= 15, (a, b, distance)


@pytest.mark.parametrize("vision", VISIONS)
@pytest.mark.parametrize("theme", THEMES.values(), ids=list(THEMES))
def test_stages_that_touch_in_the_stack_differ_for_every_kind_of_eye(theme, vision):
    usual = ["gen", "old_log_prob", "adv", "update_actor", "update_weights", "rest"]
    color = dict(zip(curves.STAGES, theme.stages, strict=True))
    order = [list(curves.STAGES), usual, [s for s in curves.STAGES if s not in ("reward", "save_checkpoint")]]
    for stages in order:
        for a, b in pairwise(stages):
            distance = np.linalg.norm(_lab(color[a], VISIONS[vision]) - _lab(color[b], VISIONS[vision]))
            assert distance >= 10, (a, b, distance)


def test_letters_are_never_smaller_than_nine_points():
    assert min(drawing.BODY, drawing.HEAD, drawing.TITLE) >= 9


def test_pictures_have_the_size_they_promise_and_the_colour_of_their_theme():
    for theme, style in THEMES.items():
        picture = Image.open(BytesIO(png(figure(synthetic(), theme=theme))))
        assert picture.size == (960, 940)
        assert "#{:02x}{:02x}{:02x}".format(*picture.convert("RGB").getpixel((1, 1))) == style.surface
    assert Image.open(BytesIO(png(figure(synthetic()), dpi=200))).size == (1920, 1880)
    assert Image.open(BytesIO(png(headline(synthetic())))).size == (960, 295)


def test_an_unknown_theme_is_refused_in_a_sentence():
    with pytest.raises(ValueError, match="There is no theme 'sepia'; curves come in light and dark"):
        figure(synthetic(), theme="sepia")


def test_names_that_are_not_ours_are_text_not_markup(tmp_path, recwarn):
    table = synthetic().drop(columns=VALIDATION)
    table["val-core/$\\frac{$ <b>&\x07\n日本/acc/mean@1"] = 0.5
    paths = save(table, tmp_path, title="cost: $\\frac{$ <5>", total_steps=50)
    assert "cost: $\\frac{$ <5>" in words(figure(table, title="cost: $\\frac{$ <5>"))
    ET.parse(paths["curves.svg"])
    assert not [str(w.message) for w in recwarn]


def test_drawing_leaves_the_users_matplotlib_as_it_was():
    import matplotlib

    with matplotlib.rc_context({"text.color": "red", "axes.grid": True, "lines.linewidth": 9}):
        before = dict(matplotlib.rcParams)
        ours = png(figure(synthetic()))
        assert dict(matplotlib.rcParams) == before
    assert png(figure(synthetic())) == ours


# --- files ---


def test_save_writes_pictures_for_both_themes_a_drawing_and_the_numbers(tmp_path):
    metrics = read_jsonl(REAL)
    paths = save(metrics, tmp_path / "a 'quoted' place", title="Run", total_steps=3)
    assert {name: path.name for name, path in paths.items()} == {
        name: name for name in ("curves.png", "curves-dark.png", "curves.svg", "curves.csv")
    }
    assert sorted(p.name for p in paths["curves.csv"].parent.iterdir()) == sorted(paths)
    for name in ("curves.png", "curves-dark.png"):
        picture = Image.open(paths[name])
        assert picture.size == (1920, 1880)
        assert picture.info["Description"] == describe(metrics)
    svg = ET.parse(paths["curves.svg"]).getroot()
    assert svg.tag.endswith("svg")
    assert describe(metrics) in "".join(svg.itertext())
    assert "training/rollout_probs_diff_mean" in [text.text for text in svg.iter("{http://www.w3.org/2000/svg}text")]
    assert len(paths["curves.csv"].read_text().splitlines()) == 4


def test_the_same_numbers_give_the_same_files(tmp_path):
    first, second = (save(synthetic(), tmp_path / name) for name in "ab")
    for name, path in first.items():
        assert path.read_bytes() == second[name].read_bytes(), name


def test_values_of_any_size_can_be_drawn(recwarn):
    table = synthetic()
    for key in ("actor/ppo_kl", "training/rollout_probs_diff_mean", "actor/grad_norm"):
        table[key] = np.resize([5e-324, 1e300, 1.0], len(table))
    table["training/rollout_actor_probs_pearson_corr"] = 1.0000001
    table["rollout_corr/kl"] = 0.0
    png(figure(table))
    assert not [str(w.message) for w in recwarn]
    assert math.isfinite(figure(table).axes[KL].get_ylim()[1])


def test_importing_the_module_does_not_import_matplotlib_and_drawing_not_pyplot():
    code = (
        "import sys, recipes.curves as c, recipes.drawing as d;"
        "print('matplotlib' in sys.modules, 'torch' in sys.modules);"
        "import pandas as pd; d.png(c.figure(pd.DataFrame())); print('matplotlib.pyplot' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["False", "False", "False"]
