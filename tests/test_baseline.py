"""Baselines: made from seeds, kept in a file, keyed by recipe, stack and hardware; nothing missing passes them."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import random
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from recipes import baseline, batch, metrics, notebook, params, verdict
from recipes.cli import main
from recipes.errors import RecipeError
from recipes.metrics.plain import Curves
from recipes.run.directory import create, update_state, write_json, write_text

NAME = "quickstart/grpo"
TODAY = datetime.date(2026, 11, 30)
DIFF = "training/rollout_probs_diff_mean"
STEP = "timing_s/step"
HOME = params.home()


def rows(seed: int, steps: int = 30) -> dict[int, dict]:
    """Steps of a healthy run whose numbers differ a little with its seed."""
    noise = random.Random(seed)
    return {
        step: {
            "critic/rewards/mean": min(0.95, 0.4 + 0.03 * step) + noise.gauss(0, 0.02),
            "critic/rewards/max": 1.0,
            "critic/advantages/max": 1.6,
            "critic/advantages/min": -1.2,
            "response_length/clip_ratio": 0.01,
            "response/aborted_ratio": 0.0,
            "actor/entropy": 0.3 + noise.gauss(0, 0.01),
            "actor/grad_norm": 0.5 + noise.random() / 10,
            "actor/pg_loss": -0.1,
            "actor/ppo_kl": 1e-4,
            DIFF: 5e-3 * (1 + noise.random() / 10),
            "training/rollout_actor_probs_pearson_corr": 0.999,
            "response_length/mean": 20 + noise.random(),
            STEP: (60 if step == 1 else 10) + noise.random() / 10,
            "perf/throughput": 30 + noise.random(),
            "actor/perf/max_memory_allocated_gb": 40 + noise.random() / 10,
            **({"val-core/x/mean@1": 0.9 + noise.gauss(0, 0.01)} if step % 10 == 0 else {}),
        }
        for step in range(1, steps + 1)
    }


def curves(data: dict[int, dict]) -> Curves:
    found = Curves()
    for step, values in data.items():
        found.add(step, values)
    return found


def sample(seed: int, steps: int = 30, **other) -> baseline.Sample:
    about = {"run": f"run{seed}", "seed": seed, "commit": "c" * 40, "date": "2026-11-30"}
    one = baseline.Sample(curves(rows(seed, steps)), "qwen3/x", "ascend-9.1.0", "atlas_a3", 16, about)
    return dataclasses.replace(one, **other)


@pytest.fixture(scope="module")
def made():
    return baseline.make([sample(seed) for seed in range(5)], today=TODAY)


def outcomes(made, data):
    return {one.key: one.outcome for one in made.compare(curves(data))}


def test_a_baseline_reads_back_as_it_was_made(made, tmp_path):
    path = tmp_path / "b.yaml"
    path.write_text(baseline.dump(made))
    assert baseline.read(path) == made
    assert made.age(datetime.date(2026, 12, 10)) == 10
    assert len(made.runs) == 5


def test_other_seeds_pass_and_the_warm_up_counts_for_nothing(made):
    for seed in range(100, 140):
        found = outcomes(made, rows(seed))
        assert set(found.values()) == {"pass"}, (seed, found)
    band = next(b for b in made.bands if b.key == STEP)
    assert (band.first, band.last) == (4, 30)  # the first step took a minute
    assert band.high < 11


def test_a_band_is_the_prediction_interval_of_one_more_run_and_no_narrower_than_its_tolerance():
    values = [0.5, 0.6, 0.7]  # s = 0.1; t(2 degrees, 0.995) = 9.925
    same = [{s: {"actor/entropy": v, STEP: 100.0} for s in range(1, 6)} for v in values]
    samples = [sample(i, curves=curves(data)) for i, data in enumerate(same)]
    found = {b.key: b for b in baseline.make(samples, warmup=0).bands}
    half = 9.925 * 0.1 * math.sqrt(1 + 1 / 3)
    assert found["actor/entropy"].high == pytest.approx(0.6 + half, rel=1e-4)
    assert (found[STEP].low, found[STEP].high) == (None, 105.0)  # 5 %, though the runs agree


WORSE = {
    "critic/rewards/mean": 0.5,
    "val-core/x/mean@1": 0.5,
    DIFF: 0.009,
    "actor/grad_norm": 2.0,
    STEP: 12.0,
    "perf/throughput": 25.0,
    "actor/perf/max_memory_allocated_gb": 42.0,
    "actor/entropy": 1.0,
    "response_length/mean": 40.0,
}
BETTER = {
    "critic/rewards/mean": 1.0,
    "val-core/x/mean@1": 1.0,
    DIFF: 0.0,
    "actor/grad_norm": 0.01,
    STEP: 1.0,
    "perf/throughput": 300.0,
    "actor/perf/max_memory_allocated_gb": 1.0,
}


def changed(key, value, seed=50):
    data = rows(seed)
    for values in data.values():
        if key in values:
            values[key] = value
    return data


@pytest.mark.parametrize("key", WORSE)
def test_what_is_worse_fails_and_is_named(made, key):
    found = [one for one in made.compare(curves(changed(key, WORSE[key]))) if one.outcome == "fail"]
    assert [one.key for one in found] == [key]
    assert f"{WORSE[key]:g}" in found[0].sentence
    assert "the baseline has" in found[0].sentence


@pytest.mark.parametrize("key", BETTER)
def test_what_is_better_never_fails(made, key):
    assert outcomes(made, changed(key, BETTER[key]))[key] == "pass"


@pytest.mark.parametrize("key", ["actor/entropy", "response_length/mean"])
def test_a_two_sided_band_fails_on_both_sides(made, key):
    assert outcomes(made, changed(key, 0.01))[key] == outcomes(made, changed(key, 99.0))[key] == "fail"


@given(st.sampled_from([DIFF, STEP, "critic/rewards/mean", "actor/entropy"]), st.integers(26, 30), st.booleans())
@settings(max_examples=20, deadline=None)
def test_one_value_that_is_missing_or_not_finite_fails(key, step, finite):
    made = baseline.make([sample(seed) for seed in range(3)])
    data = rows(50)
    if finite:
        del data[step][key]
    else:
        data[step][key] = math.nan
    assert outcomes(made, data)[key] == "fail"


def test_too_few_steps_fail_with_one_sentence(made):
    [found] = made.compare(curves(rows(50, steps=29)))
    assert found.outcome == "fail"
    assert found.sentence == "the run has 29 steps, and the baseline is of runs of 30: nothing can be compared"


def test_a_longer_run_is_compared_at_the_same_steps(made):
    data = rows(50) | {s: values | {"critic/rewards/mean": 0.0} for s, values in rows(50, 60).items() if s > 30}
    assert set(outcomes(made, data).values()) == {"pass"}


def test_a_processor_has_no_band_of_speed():
    made = baseline.make([sample(seed, hardware="cpu") for seed in range(3)])
    assert not [band.key for band in made.bands if band.performance]


def lost(seed):
    data = rows(seed)
    data[30]["actor/entropy"] = None
    return data


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([sample(1), sample(2)], "takes 3 runs or more"),
        ([sample(1), sample(2), sample(3, stack="cpu")], "stack is ascend-9.1.0 and cpu"),
        ([sample(1), sample(2), sample(3, devices=32)], "devices is 16 and 32"),
        ([sample(1), sample(2), sample(3, steps=20)], "20 and 30 steps"),
        ([sample(1), sample(2), sample(1)], "run run1 is given twice"),
        ([sample(1), sample(2), sample(3, about={"run": "z", "seed": 1})], "seed 1 has been run twice"),
        ([sample(1), sample(2), sample(3, curves=curves(lost(3)))], "actor/entropy is not finite at step 30"),
    ],
)
def test_runs_that_make_no_baseline_are_refused(samples, words):
    with pytest.raises(RecipeError, match=words):
        baseline.make(samples)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"metrics": {}}, "has no metrics"),
        ({"made": "yesterday"}, "is no baseline"),
        ({"devices": None}, "is no baseline"),
        ({"metrics": {"a": {"statistic": "mode", "steps": [1, 2], "middle": 1, "low": 0}}}, "statistic='mode' must be"),
        ({"metrics": {"a": {"statistic": "mean", "steps": [5, 2], "middle": 1, "low": 0}}}, "must be two steps"),
        ({"metrics": {"a": {"statistic": "mean", "steps": [1, 2], "middle": 1}}}, "needs low, high or both"),
        ({"metrics": {"a": {"statistic": "mean", "steps": [1, 2], "middle": 1, "low": 2}}}, "with middle between"),
        ({"metrics": {"a": {"statistic": "mean", "steps": [1, 2], "middle": 1, "low": math.nan}}}, "finite"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_baseline_is_one_sentence(made, tmp_path, change, words):
    import yaml

    path = tmp_path / "b.yaml"
    path.write_text(yaml.safe_dump(yaml.safe_load(baseline.dump(made)) | change))
    with pytest.raises(RecipeError, match=words):
        baseline.read(path)


# ------------------------------------------------------------------------------------------ in the workbook


def files():
    return sorted((params.home() / "params" / "baselines").glob("*/*.yaml"))


@pytest.mark.parametrize("path", files(), ids=lambda p: p.parent.name)
def test_every_baseline_of_the_workbook_is_of_a_recipe_and_where_judge_looks(path):
    found = baseline.read(path)
    assert path == baseline.place(found.recipe, found.stack, found.hardware)
    recipe = params.compose(found.recipe).recipe
    assert (recipe.stack, recipe.hardware) == (found.stack, found.hardware)
    a_node = recipe.devices or params.hardware_facts(recipe.hardware).devices_per_node
    assert found.devices == recipe.nodes * a_node
    assert found.published or len(found.runs) >= baseline.FEWEST_RUNS
    assert found.rule
    assert found.commit


def test_the_published_nightly_is_marked_and_its_own_numbers_pass_it():
    found, _ = baseline.find("qwen3/gspo_30b_a3b_vllm_a3", "ascend-9.1.0", "atlas_a3", 16)
    assert found.published.startswith("github.com/verl-project/verl-ascend-recipe")
    assert "published elsewhere" in found.described()
    nightly = {band.key: band.middle for band in found.bands}
    assert nightly == {
        "actor/perf/max_memory_allocated_gb": 49.135295,
        STEP: 90.368034,
        "perf/throughput": 32.056511,
        "critic/rewards/mean": 0.9375,
        DIFF: 0.005604,
    }
    assert set(outcomes(found, dict.fromkeys(range(1, 16), nightly)).values()) == {"pass"}
    # The nightly's own gate fails both of these improvements.
    better = nightly | {DIFF: 0.005604 * 0.9, "critic/rewards/mean": 0.99}
    assert set(outcomes(found, dict.fromkeys(range(1, 16), better)).values()) == {"pass"}
    assert outcomes(found, dict.fromkeys(range(1, 16), nightly | {STEP: 95.0}))[STEP] == "fail"


# ------------------------------------------------------------------------------------------ runs


@pytest.fixture
def home(tmp_path, monkeypatch):
    """The workbook with a folder of baselines of its own."""
    place = tmp_path / "home"
    place.mkdir()
    (place / "params").mkdir()
    for path in (params.home() / "params").iterdir():
        if path.name != "baselines":
            (place / "params" / path.name).symlink_to(path)
    monkeypatch.setenv("RECIPES_HOME", str(place))
    return place


def write_run(folder, seed, data=None, given=("trainer.seed",), **state):
    run = create(folder, NAME, {"steps": 30, "given": list(given)})
    write_text(run.path / "recipe.yaml", params.dump(params.compose(NAME, [f"trainer.seed={seed}"]).recipe))
    write_json(
        run.path / "provenance.json",
        {"repositories": {"workbook": {"commit": "c" * 40}}, "packages": {"verl": "0.9.1"}},
    )
    lines = [json.dumps({"step": step, "data": values}) for step, values in (data or rows(seed)).items()]
    write_text(run.metrics(1), "\n".join(lines) + "\n")
    update_state(run, **{"state": "finished", **state})
    return run


def call(*words):
    return CliRunner().invoke(main, list(map(str, words)))


def test_from_runs_to_a_baseline_to_a_verdict(tmp_path, home):
    runs = [write_run(tmp_path / f"run {seed}", seed) for seed in range(3)]
    done = call("baseline", "make", *(run.path for run in runs))
    assert done.exit_code == 0, done.output
    path = baseline.place(NAME, "cpu", "cpu")
    assert home in path.parents
    assert [run["seed"] for run in baseline.read(path).runs] == [0, 1, 2]
    assert "is there already" in call("baseline", "make", *(run.path for run in runs)).output
    assert call("baseline", "make", "--replace", *(run.path for run in runs)).exit_code == 0
    assert str(path) not in call("baseline", "show").output
    assert "commit cccccccccccc" in call("baseline", "show", path).output

    good = notebook.judge(write_run(tmp_path / "good", 7).path)
    assert good.verdict.passed, good.text()
    assert f"commit {'c' * 12}, 0 days old" in good.text()

    bad = notebook.judge(write_run(tmp_path / "bad", 8, changed(DIFF, 0.009, seed=8)).path)
    [failed] = [j for j in bad.verdict.judgements if j.outcome == "fail"]
    assert (failed.rule, failed.step) == ("BASELINE", 4)

    other = write_run(tmp_path / "other", 9, given=("optimizer.lr", "trainer.seed"))
    [said] = [j for j in notebook.judge(other.path).verdict.judgements if j.rule == "BASELINE"]
    assert said.outcome == "info"
    assert "this run changes optimizer.lr" in said.sentence
    explicit = notebook.judge(other.path, baseline=path).verdict
    assert [j.outcome for j in explicit.judgements if j.rule == "BASELINE"].count("pass") > 3

    assert not [j for j in explicit.judgements if j.outcome == "warn" and j.rule == "BASELINE"]

    published = HOME / "params/baselines/qwen3-gspo_30b_a3b_vllm_a3/ascend-9.1.0-atlas_a3.yaml"
    foreign = notebook.judge(other.path, baseline=published).verdict
    [warned] = [j for j in foreign.judgements if j.outcome == "warn" and j.rule == "BASELINE"]
    assert warned.sentence.startswith("the baseline is of another recipe (qwen3/gspo_30b_a3b_vllm_a3, this run: quick")
    assert "hardware (atlas_a3, this run: cpu), devices (16, this run: 1)" in warned.sentence

    bare = call("judge", other.path / "attempts/1/metrics.jsonl", "--baseline", path, "--json")
    assert bare.exit_code == 0, bare.output


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"state": "failed"}, "a baseline is made from finished runs"),
        ({"data": changed(DIFF, 0.5)}, "may not be believed (MISMATCH"),
    ],
)
def test_a_run_that_may_not_be_believed_makes_no_baseline(tmp_path, home, change, words):
    runs = [write_run(tmp_path / f"{seed}", seed, **(change if seed == 2 else {})) for seed in range(3)]
    done = call("baseline", "make", *(run.path for run in runs))
    assert done.exit_code == 2
    assert words in done.output
    assert not baseline.place(NAME, "cpu", "cpu").exists()


def test_without_a_baseline_that_is_said(tmp_path, home):
    found = notebook.judge(write_run(tmp_path / "run", 1).path).verdict
    said = {j.rule: j for j in found.judgements}
    assert said["BASELINE"].sentence == f"there is no baseline of {NAME} on cpu, stack cpu"
    assert said["PERF"].outcome == "info"


def test_speed_has_a_rule_of_its_own(made, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": s, "data": d}) + "\n" for s, d in changed(STEP, 12.0).items()))
    found = verdict.judge(metrics.read_jsonl(path), {"state": "finished", "steps": 30}, baseline=made)
    failed = [j for j in found.judgements if j.outcome == "fail"]
    assert [j.rule for j in failed] == ["PERF"]
    assert failed[0].source.startswith(f"baseline of {TODAY}, commit cccccccccccc")


def test_every_run_of_the_npu_nightly_is_compared_with_its_baseline():
    """Its runs say how many steps they take; that makes no other recipe of them."""
    for item in batch.load(HOME / "params" / "batches" / "nightly_a3.yaml").items:
        composed = item.plan.composed
        changed = [key for key in composed.given if not baseline._SAME.match(key)]
        recipe = composed.recipe
        found, why = baseline.find(item.recipe, recipe.stack, recipe.hardware, item.devices)
        assert (changed, why) == ([], "")
        assert found is not None


REAL = Path(__file__).parent / "data" / "verdict"
SEEDS = sorted(REAL.glob("quickstart_seed_*.csv"))


def real(path: Path, steps: int | None = None) -> baseline.Sample:
    """A real training of the quickstart, or its first `steps`: tests/data/verdict/README.md says how each was made."""
    seed = int(path.stem.rpartition("_")[2]) if path in SEEDS else 1
    about = {"run": path.stem, "seed": seed, "commit": "c" * 40, "date": "2026-11-30"}
    found = metrics.read(path)
    if steps is not None:
        found = dataclasses.replace(found, table=found.table.loc[:steps])
    return baseline.Sample(Curves.of(found), NAME, "cpu", "cpu", 1, about)


@pytest.mark.parametrize("left_out", SEEDS, ids=lambda path: path.stem)
def test_a_real_seed_is_within_the_bands_of_the_others(left_out):
    """But for what the machine was busy with: two trainings ran at a time, and the last one alone."""
    made = baseline.make([real(path) for path in SEEDS if path != left_out], today=TODAY)
    found = {one.key: one for one in made.compare(real(left_out).curves)}
    assert {"critic/rewards/mean", "actor/entropy", DIFF, "val-core/addition/reward/mean@1"} <= set(found)
    outside = [str(one) for one in found.values() if one.outcome == "fail" and not one.performance]
    assert outside == []


@pytest.mark.parametrize(
    ("name", "outside"),
    [
        ("quickstart_lr_1e-3", {"critic/rewards/mean"}),
        ("quickstart_reward_never_matches", {"critic/rewards/mean"}),
        ("quickstart_cap_of_5_tokens", {"critic/rewards/mean", "response_length/mean"}),
        ("quickstart_stale_rollout", {DIFF}),
    ],
)
def test_real_runs_that_broke_are_outside_the_bands_of_five_real_seeds(name, outside):
    """The bands are of as many steps as the run that broke has: a short one would fail by its length alone."""
    broken = real(REAL / f"{name}.csv")
    steps = max(broken.curves.trained)
    made = baseline.make([real(path, steps) for path in SEEDS], warmup=2, today=TODAY)
    found = {one.key: one for one in made.compare(broken.curves)}
    assert {key for key in outside if found[key].value is not None} == outside  # measured, not missing
    assert outside <= {key for key, one in found.items() if one.outcome == "fail"}


def test_a_copy_under_another_seed_is_refused():
    copied = [dataclasses.replace(sample(0), about=sample(seed).about) for seed in range(3)]
    with pytest.raises(RecipeError, match="run0 and run1 have the same values at every step"):
        baseline.make(copied, today=TODAY)


def test_a_band_of_a_positive_quantity_does_not_reach_down_to_zero():
    """Five seeds that end between 0.003 and 0.04 nats: less than half of the lowest is no longer one of them."""
    ends = (0.003, 0.008, 0.012, 0.02, 0.04)
    samples = [sample(seed) for seed in range(5)]
    for one, end in zip(samples, ends, strict=True):
        one.curves.values["actor/entropy"] = dict.fromkeys(one.curves.values["actor/entropy"], end)
    [band] = [band for band in baseline.make(samples, today=TODAY).bands if band.key == "actor/entropy"]
    assert 0 < band.low < 0.003
