"""The reward of the tiny data set: the share of the response's words that are the word asked for."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None, **_) -> float:
    """Reward in [0, 1], with verl's signature of a custom reward function."""
    words = solution_str.split()
    return sum(word == ground_truth for word in words) / max(1, len(words))
