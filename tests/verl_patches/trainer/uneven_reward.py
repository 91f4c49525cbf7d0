"""A reward that a model with random weights earns too, but not for every answer."""


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Score the share of letters from the alphabet's first half in the answer, from 0 to 1."""
    return sum(character < "n" for character in solution_str) / max(len(solution_str), 1)


def compute_score_and_accuracy(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> dict[str, float]:
    """Score the same way; the accuracy is whether the score is more than half."""
    score = compute_score(data_source, solution_str, ground_truth, extra_info)
    return {"score": score, "acc": float(score > 0.5)}
