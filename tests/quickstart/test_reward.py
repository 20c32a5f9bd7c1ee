"""The exact-match reward, and what text from a model may do to it: nothing."""

import subprocess
import sys
import time

import pytest

from recipes.quickstart.reward import compute_score


def score(response: str, truth: str | int = "557") -> float:
    return compute_score("addition", response, truth)["score"]


@pytest.mark.parametrize(
    "response", ["#### 557", "2+5=7\n7+8=15\n4+0+1=5\n#### 557", "#### 1\n#### 557", "so #### 557 it is"]
)
def test_the_last_answer_is_the_sum(response):
    assert score(response) == 1.0


@pytest.mark.parametrize(
    "response",
    [
        "",
        "557",
        "####557",
        "#### 55",
        "#### 5570",
        "#### 0557",
        "#### -557",
        "#### 557\n#### 558",
        "#### five hundred and fifty-seven",
        "#### ٥٥٧",  # the same number in other digits
        "####\n557",
    ],
)
def test_anything_else_is_worth_nothing(response):
    assert score(response) == 0.0


def test_a_number_as_ground_truth_counts_like_its_digits():
    assert score("#### 557", 557) == 1.0


def test_worked_looks_at_the_work_alone():
    assert compute_score("addition", "2+5=7\n#### 1", "557") == {"score": 0.0, "worked": 1.0}
    assert compute_score("addition", "#### 557", "557") == {"score": 1.0, "worked": 0.0}


@pytest.mark.parametrize(
    "response", ["#### " * 200_000, "####" + " " * 10**6, "#### " + "9" * 10**6, "=\0#### \udcff" * 10**5]
)
def test_hostile_text_neither_raises_nor_takes_long(response):
    started = time.process_time()
    assert score(response) == 0.0
    assert time.process_time() - started < 2.0


def test_text_is_matched_and_never_evaluated():
    assert score("#### __import__('os').abort()") == 0.0
    assert score("#### 557; {ground_truth}") == 1.0


def test_extra_arguments_of_later_versions_are_tolerated():
    assert compute_score("x", "#### 557", "557", extra_info={"index": 0}, reward_router_address=None)["score"] == 1.0


def test_verl_finds_the_function_by_the_name_the_recipe_gives():
    load = pytest.importorskip("verl.utils.import_utils").load_extern_object
    function = load(module_path="pkg://recipes.quickstart.reward", object_name="compute_score")
    assert function("addition", "#### 557", "557")["score"] == 1.0


def test_the_task_and_the_reward_need_neither_torch_nor_transformers():
    code = (
        "import sys, recipes.quickstart.reward, recipes.quickstart.task, recipes.quickstart.data, "
        "recipes.quickstart.warm_start, recipes.quickstart.prepare;"
        "print([name for name in ('torch', 'transformers', 'pandas', 'verl', 'ray') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
