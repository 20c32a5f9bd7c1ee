#!/usr/bin/env python3
"""Measure the figures this workbook states, on the machine it is run on. `scripts/measure.py --help`

quick   start-up of `recipes --help` and of `import recipes`: medians of 11 child processes
plan    what is done before a launch, in wall and processor seconds, each beside its goal: `recipes check` of one
        recipe and of all, `recipes simulate` of GLM-5.2 on 512 devices and on 8192, `recipes layouts` for 512
run     one quickstart run: seconds from launch to last step, step time by stage, peak memory of all its processes
seeds   validation reward before, during and after training for --pairs seeds (the quickstart's promise)
ratio   the quickstart through the notebook against bare verl with the same argv and environment, in turn
faults  the same faults given to bare verl and to `recipes check`: what each says, and after how many seconds
metrics speed and memory of the readers: JSON lines, TensorBoard against its own reader, a console log of 1 GB
redraw  the live board of a run of 2,000 steps: its curves in both themes, its lights, its HTML
batch   8 quick runs (real but for verl), one then --pairs at a time: speed-up, overhead a run, against plain papermill
watching memory of the supervisor, its guard and `recipes watch` while a run writes a log of 2 GB
fresh   a fresh clone: seconds from scripts/quickstart.sh to the curve (needs a package index)
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from recipes import metrics as tables  # noqa: E402
from recipes import notebook, page, params  # noqa: E402
from recipes.command import build  # noqa: E402
from recipes.run.causes import last_exception  # noqa: E402

RECIPE = "quickstart/grpo"
WHAT = ("quick", "plan", "run", "seeds", "ratio", "faults", "metrics", "redraw", "watching", "batch", "fresh")


def quick() -> dict:
    bin_folder = Path(sys.executable).parent
    commands = {
        "recipes --help": [str(bin_folder / "recipes"), "--help"],
        "import recipes": [sys.executable, "-c", "import recipes"],
        "python alone": [sys.executable, "-c", ""],
    }
    return {
        f"{name}, ms": round(1000 * statistics.median(seconds(c) for _ in range(11))) for name, c in commands.items()
    }


CHECKED, PLANNED = "qwen3/grpo_8b_vllm_a2", "glm5_2/grpo_a3_512"
WHOLE_PROCESS = """
import sys, time
{imports}
began = time.perf_counter(), time.process_time()
{work}
print(time.perf_counter() - began[0], time.process_time() - began[1])
"""


def plan() -> dict:
    """Medians of 5 for a command, one run of what takes longer. In seconds, but for the ratio of two worlds."""
    command = [str(Path(sys.executable).parent / "recipes"), "check", CHECKED, "--anywhere"]
    python = [sys.executable, "-c", ""]
    alone = [timed_command(python) for _ in range(5)]
    whole = [timed_command(command) for _ in range(5)]
    found = {
        "recipes check of one recipe": (*medians(whole), "1"),
        "the same without python's start": (
            *(a - b for a, b in zip(medians(whole), medians(alone), strict=True)),
            "1",
        ),
    }
    check = (
        "for name in params.names():\n"
        "    composed = params.compose(name)\n"
        "    compose_verl(build(composed), composed)\n"
        "    preflight.check(composed, here=False)"
    )
    imports = "from recipes import params, preflight\nfrom recipes.command import build, compose_verl"
    found["recipes check of all, one process"] = (*inside(imports, check), "5")
    simulated = timed_command([command[0], "simulate", PLANNED])
    found["recipes simulate, GLM-5.2 on 512"] = (*simulated, "30")
    larger = timed_command([command[0], "simulate", PLANNED, "nodes=512", "batch.train=1024", "batch.mini=256"])
    found["world 8192 / world 512"] = (*(a / b for a, b in zip(larger, simulated, strict=True)), "1.2")
    found["recipes layouts for 512 devices"] = (*timed_command([command[0], "layouts", PLANNED, "--nodes", "32"]), "10")
    return {name: f"{wall:8.2f} wall {cpu:8.2f} processor   goal {goal}" for name, (wall, cpu, goal) in found.items()}


def timed_command(command: list[str]) -> tuple[float, float]:
    """Seconds of wall and of processor (its own and its children's) of a command that succeeds."""
    # Where Python may keep no bytecode, our modules are compiled at each start: 0.2 s that no user's machine takes.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    before, began = os.times(), time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=environment)
    after, wall = os.times(), time.perf_counter() - began
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


def inside(imports: str, work: str) -> tuple[float, float]:
    """Seconds of wall and of processor of `work` in a new process, imports left out."""
    script = WHOLE_PROCESS.format(imports=imports, work=work)
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True, cwd=ROOT)
    wall, cpu = map(float, done.stdout.split()[-2:])
    return wall, cpu


def medians(pairs: list[tuple[float, float]]) -> tuple[float, float]:
    walls, processors = zip(*pairs, strict=True)
    return statistics.median(walls), statistics.median(processors)


def run(steps: int | None = None) -> dict:
    """A bare verl run (no notebook, no supervisor) with what the workbook would launch."""
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        wall, peak, table = bare(Path(folder) / "run", steps)
        return {"launch to end, s": round(wall, 1), "peak memory, GB": round(peak / 1e9, 2), **stages(table)}


def ratio(pairs: int, steps: int | None) -> dict:
    """Notebook and bare runs in turn, so that a machine that slows down slows both."""
    quotients, walls = [], {"notebook": [], "bare": []}
    for n in range(pairs):
        with tempfile.TemporaryDirectory(prefix="measure-") as folder:
            through = launched(Path(folder) / "notebook", steps)
            alone, _, _ = bare(Path(folder) / "bare", steps)
        walls["notebook"].append(through)
        walls["bare"].append(alone)
        quotients.append(through / alone)
        print(
            f"pair {n + 1}: notebook {through:.1f} s, bare {alone:.1f} s, ratio {through / alone:.3f}", file=sys.stderr
        )
    return {
        "notebook, s (median)": round(statistics.median(walls["notebook"]), 1),
        "bare, s (median)": round(statistics.median(walls["bare"]), 1),
        "notebook / bare (median of pairs)": round(statistics.median(quotients), 3),
    }


def seeds(count: int, steps: int | None) -> dict:
    """The quickstart with seeds 1 to `count`, bare: validation reward at each of its steps, and the seconds."""
    found = {}
    for seed in range(1, count + 1):
        with tempfile.TemporaryDirectory(prefix="measure-") as folder:
            wall, _, table = bare(Path(folder) / "run", steps, [f"trainer.seed={seed}"])
        [name] = [name for name in table if name.startswith("val-core/")]
        found[f"seed {seed}"] = " ".join(f"{value:.2f}" for value in table[name].dropna()) + f"  ({wall:.0f} s)"
        print(f"seed {seed}: {found[f'seed {seed}']}", file=sys.stderr)
    return found


FAULTS = {
    "layout.heads": ("cpu/qwen3", ["parallel.tensor=3", "devices=3", "batch.train=6", "batch.mini=3", "batch.micro=4"]),
    "layout.layers": ("cpu/qwen3", ["parallel.pipeline=4", "devices=4"]),
    "layout.experts": (
        "cpu/qwen3_moe",
        ["parallel.expert=3", "devices=3", "batch.train=6", "batch.mini=3", "batch.micro=4"],
    ),
    "batch.mini": ("cpu/qwen3", ["batch.mini=16"]),
    "batch.mini_over_ranks": ("cpu/qwen3", ["devices=3", "batch.train=6", "batch.micro=1"]),
    "batch.micro": ("cpu/qwen3", ["batch.micro=5", "batch.train=10"]),
    "memory.recompute": ("cpu/qwen3", ["memory.recompute=full"]),
    "lengths.positions": ("cpu/qwen3", ["data.max_response_length=600"]),
    "files.data": ("cpu/qwen3", ["data.train_files=/no/such/train.parquet"]),
    "reward.trial": ("cpu/qwen3", ["reward.name=no_such_function"]),
}
PATIENCE = 180  # seconds a faulty run may take to notice


def faults() -> dict:
    """Each fault once: seconds and words of `recipes check`, and of verl alone until it ends."""
    print("| fault | `recipes check` | s | verl alone | s |\n|---|---|---|---|---|")
    for rule, (name, overrides) in FAULTS.items():
        with tempfile.TemporaryDirectory(prefix="measure-") as folder:
            run_dir = Path(folder) / "run"
            composed = params.compose(name, overrides, run_dir=str(run_dir))
            notebook.prepare(params.compose(name, run_dir=str(run_dir)))
            words = [sys.executable, "-m", "recipes.cli", "check", name, *overrides, "--json"]
            began = time.monotonic()
            said = subprocess.run(words, capture_output=True, text=True, check=False)
            ours = time.monotonic() - began
            [finding, *_] = [f for f in json.loads(said.stdout) if f["rule"] == rule]
            run_dir.mkdir(exist_ok=True)
            (run_dir / "attempts" / "1").mkdir(parents=True)
            theirs, last = alone(build(composed), run_dir / "log")
        row = f"| `{' '.join(overrides)}` | {finding['sentence']} | {ours:.1f} | {last} | {theirs:.0f} |"
        print(row.replace(f"{ROOT}/", ""), flush=True)
    return {}


def alone(command, log: Path) -> tuple[float, str]:
    """Run verl by itself until it ends or PATIENCE is over; returns the seconds, and its last exception in one line."""
    began = time.monotonic()
    with log.open("wb") as out:
        child = subprocess.Popen(
            command.argv, env={**os.environ, **command.environment}, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code = child.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            code = None
            for process in [*psutil.Process(child.pid).children(recursive=True), psutil.Process(child.pid)]:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            child.wait()
    took = time.monotonic() - began
    if code == 0:
        return took, "nothing: it trains"
    if code is None:
        return took, "nothing yet"
    return took, last_exception(log).replace("|", "/")[:160] or "an exit code"


def metrics(steps: int | None) -> dict:
    """Prints its own table; `--steps` scales everything down for a quick look."""
    from measure_metrics import measure

    steps = steps or 100_000
    measure(ROOT, steps, max(1, 1024 * steps // 100_000))
    return {}


def redraw(steps: int | None) -> dict:
    """Medians of 15. The keys are those of a real run of verl; its few steps are repeated with a tenth of noise."""
    import numpy as np
    import pandas as pd

    from recipes import curves, lights

    steps = steps or 2_000
    real = tables.read_jsonl(ROOT / "tests" / "data" / "metrics" / "one_run" / "metrics.jsonl").table
    noise = np.random.default_rng(0).normal(1, 0.1, (steps, real.shape[1]))
    values = np.resize(real.ffill().bfill().to_numpy(), noise.shape) * noise
    found = tables.as_metrics(pd.DataFrame(values, index=np.arange(1, steps + 1), columns=real.columns))
    sheet, took, busy = curves.Sheet(), [], []
    for _ in range(16):
        began, spent = time.perf_counter(), time.process_time()
        pages = sheet.begin(found, title="a run", total_steps=steps)
        health, words = lights.row(lights.lights(found)), curves.describe(found)
        html = page.block(page.picture(*pages(), words), health)
        took.append(time.perf_counter() - began)
        busy.append(time.process_time() - spent)
    return {
        "steps x metrics": f"{steps} x {real.shape[1]}",
        "the first redraw, s": round(took[0], 2),
        "a redraw, s (goal 0.3)": round(statistics.median(took[1:]), 3),
        "of the processor, s": round(statistics.median(busy[1:]), 3),
        "HTML, MB": round(len(html) / 1e6, 2),
    }


def watching(gigabytes: float = 2.0) -> dict:
    """A run that does nothing but write a log, under a real supervisor and watched by a real `recipes watch`."""
    from recipes.run import launch
    from recipes.run.directory import create, read_state, write_json

    writer = (
        "import sys\nline = b'(WorkerDict pid=1) ' + b'x' * 180 + b'\\n'\n"
        f"for _ in range({int(gigabytes * 1e9 / 200 / 1000)}): sys.stdout.buffer.write(line * 1000)\n"
    )
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        made = create(Path(folder) / "run", "log", {"on_disconnect": "stop"})
        write_json(made.attempt(1) / "command.json", {"argv": [sys.executable, "-c", writer], "environment": {}})
        began = time.monotonic()
        launch.start_supervisor(made, 1)
        watcher = subprocess.Popen(
            [sys.executable, "-m", "recipes.cli", "watch", str(made.path)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        supervisor = psutil.Process(read_state(made)["supervisor"]["pid"])
        peaks: dict[str, float] = {}
        while watcher.poll() is None:
            with contextlib.suppress(psutil.Error):
                for name, process in {"supervisor": supervisor, "watch": psutil.Process(watcher.pid)}.items():
                    peaks[name] = max(peaks.get(name, 0.0), process.memory_info().rss / 1e6)
            time.sleep(0.05)
        size = made.log(1).stat().st_size
        return {
            "log, GB": round(size / 1e9, 2),
            "seconds to the end": round(time.monotonic() - began, 1),
            "state": read_state(made)["state"],
            **{f"{name}, MB at most": round(peak) for name, peak in peaks.items()},
        }


def batch(workers: int, count: int = 8) -> dict:
    """`recipes batch` with a stand-in for verl (10 steps of 3 s), and the same notebook by as many plain papermills.

    Without the notebook's preflight and second drawing: what is left mostly waits, so that two cores allow for several.
    Overhead of a run: from the end of a papermill to the start of the next one in its place. What the machine allows: a
    papermill takes longer beside others, and no batch can win that back.
    """
    import nbformat

    from recipes import batch, batch_run, headless

    children, begin, lives = ROOT / "tests" / "children", headless.begin, []
    os.environ |= {"RECIPES_PYTHON": str(children / "python"), "REAL_PYTHON": sys.executable}
    os.environ |= {"TRAINER": "train healthy", "TRAINER_STEP_SECONDS": "3"}

    def lived(child: subprocess.Popen, began: float) -> None:
        child.wait()
        lives.append((began, time.perf_counter()))

    def timed(*words, **options) -> subprocess.Popen:
        began, child = time.perf_counter(), begin(*words, **options)
        threading.Thread(target=lived, args=(child, began)).start()
        return child

    def together(place: Path, many: int) -> float:
        began = time.perf_counter()
        for child in [
            begin(place.parent / "quick.ipynb", {"recipe": "cpu/qwen3", "steps": 10}, place / str(n))
            for n in range(many)
        ]:
            child.wait()
        return time.perf_counter() - began

    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        place = Path(folder)
        file = place / "eight.yaml"
        book = nbformat.read(ROOT / "notebooks" / "00_quickstart.ipynb", 4)
        book.cells = [c for c in book.cells if not re.search(r"notebook\.(check|judge|record)\(", c.source)]
        nbformat.write(book, place / "quick.ipynb")
        runs = f"[{{recipe: cpu/qwen3, overrides: [steps=10, 'prepare=[]'], seeds: {count}}}]"
        file.write_text(f"notebook: quick.ipynb\nthresholds: [minimum_steps=2]\nruns: {runs}\n")
        one, many = together(place / "one", 1), together(place / "many", workers)
        headless.begin = timed
        began = time.perf_counter()
        outcomes, _ = batch_run.run(batch.load(file), place / "batch", workers=workers)
        wall = time.perf_counter() - began
    assert all(o.what == "passed" for o in outcomes), [o.cause for o in outcomes]
    starts, ends = sorted(start for start, _ in lives), sorted(end for _, end in lives)
    gaps = [start - end for start, end in zip(starts[workers:], ends, strict=False)]
    return {
        "papermill alone, s": round(one, 1),
        f"{workers} papermills at once, s": round(many, 1),
        f"batch of {count}, {workers} at a time, s": round(wall, 1),
        "speed-up / workers": round(count * one / wall / workers, 3),
        "the same, of what the machine allows": round(count * many / wall / workers, 3),
        "papermills' lives / (wall x workers)": round(sum(end - start for start, end in lives) / wall / workers, 3),
        "overhead a run, s (median)": round(statistics.median(gaps), 2),
        "overhead a run, s (most)": round(max(gaps), 2),
        "before the first, s": round(min(start for start, _ in lives) - began, 1),
    }


def fresh() -> dict:
    with tempfile.TemporaryDirectory(prefix="measure-") as folder:
        clone = Path(folder) / "clone"
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        began = time.monotonic()
        subprocess.run([str(clone / "scripts" / "quickstart.sh")], check=True, cwd=folder)
        return {"fresh clone to curve, s": round(time.monotonic() - began, 1)}


def bare(run_dir: Path, steps: int | None, more: list[str] = ()) -> tuple[float, int, object]:
    """Run verl directly; returns seconds, peak resident bytes of the process tree, and the table of metrics."""
    overrides = [*more] + ([] if steps is None else [f"steps={steps}"])
    composed = params.compose(RECIPE, overrides, run_dir=str(run_dir))
    notebook.prepare(composed)
    command = build(composed)
    (run_dir / "attempts" / "1").mkdir(parents=True)
    peak, ended = [0], threading.Event()
    with (run_dir / "log").open("wb") as log:
        began = time.monotonic()
        child = subprocess.Popen(
            command.argv, env={**os.environ, **command.environment}, stdout=log, stderr=log, start_new_session=True
        )
        watcher = threading.Thread(target=watch_memory, args=(child.pid, peak, ended))
        watcher.start()
        code = child.wait()
        wall = time.monotonic() - began
        ended.set()
        watcher.join()
    if code:
        kept = shutil.copy(run_dir / "log", Path(tempfile.gettempdir()) / "measure.log")
        raise SystemExit(f"verl failed with exit code {code}; see {kept}")
    return wall, peak[0], tables.read_jsonl(run_dir / "attempts" / "1" / "metrics.jsonl").table


def launched(run_dir: Path, steps: int | None) -> float:
    """Run the notebook by papermill; returns the seconds of its training, from launch to end, by run.json."""
    words = [sys.executable, "-m", "recipes.cli", "notebook", str(ROOT / "notebooks" / "00_quickstart.ipynb")]
    words += ["--run-dir", str(run_dir)] + ([] if steps is None else ["-p", "steps", str(steps)])
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    attempt = json.loads((run_dir / "run.json").read_text())["attempts"][0]
    return attempt["seconds"]


def watch_memory(pid: int, peak: list[int], ended: threading.Event) -> None:
    """Sum the proportional set size of a process tree: shared pages count once."""
    while not ended.wait(2.0):
        total = 0
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            try:
                total += process.memory_full_info().pss
            except psutil.Error:
                continue
        peak[0] = max(peak[0], total)


def stages(table) -> dict:
    """Median seconds of a step and of its stages, the first step apart: it compiles and warms up."""
    found = {"first step, s": round(float(table["timing_s/step"].dropna().iloc[0]), 2)}
    for key in ("step", "gen", "old_log_prob", "update_actor", "update_weights", "testing"):
        if f"timing_s/{key}" in table:
            found[f"{key}, s (median)"] = round(float(table[f"timing_s/{key}"].dropna().iloc[1:].median()), 3)
    return found


def seconds(command: list[str]) -> float:
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("--steps", type=int, help="steps of each run (default: as in the recipe)")
    parser.add_argument("--pairs", type=int, default=3, help="pairs of `ratio`, seeds of `seeds`, workers of `batch`")
    given = parser.parse_args()
    measure = {
        "quick": quick,
        "plan": plan,
        "run": lambda: run(given.steps),
        "fresh": fresh,
        "faults": faults,
        "watching": watching,
    }
    measure["metrics"] = lambda: metrics(given.steps)
    measure["redraw"] = lambda: redraw(given.steps)
    measure["batch"] = lambda: batch(given.pairs)
    measure["ratio"] = lambda: ratio(given.pairs, given.steps)
    measure["seeds"] = lambda: seeds(given.pairs, given.steps)
    for name, value in measure[given.what]().items():
        print(f"{name:36} {value}")


if __name__ == "__main__":
    main()
