"""The reward of the quickstart task: 1 when the last ``#### N`` of the response is the sum, else 0.

verl imports this file inside its reward workers (``reward.custom_reward_function.path=pkg://recipes.quickstart.reward``),
so it needs nothing but the standard library. The response is untrusted text: it is matched, never evaluated.
"""

from __future__ import annotations

import re
from typing import Any

# ASCII digits only: `\d` also matches the digits of other scripts, which are not the answer asked for.
FINAL_ANSWER = re.compile(r"#### ([0-9]+)")


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str | int,
    extra_info: dict[str, Any] | None = None,
    **_: Any,
) -> dict[str, float]:
    """Score one response.

    Args:
        data_source: Name of the data set; the rule is the same for all.
        solution_str: The decoded response, special tokens removed.
        ground_truth: The sum, written in decimal.
        extra_info: What else the data file says about the problem; not needed.

    Returns:
        ``score``: 1.0 when the last ``#### N`` has exactly the digits of the sum, else 0.0 (also without any).
        ``worked``: 1.0 when the response writes work out (has an ``=``), a side metric that is not rewarded.
    """
    answers = FINAL_ANSWER.findall(solution_str)
    return {
        "score": float(bool(answers) and answers[-1] == str(ground_truth)),
        "worked": float("=" in solution_str),
    }
