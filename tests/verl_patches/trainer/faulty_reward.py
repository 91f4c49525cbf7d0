"""A reward that fails at its fifth call, and from its second step on is not a number."""

calls = 0
PER_STEP = 64


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """How long the answer is; the batch whose fifth call failed is scored once more, so its calls number 68."""
    global calls
    calls += 1
    if calls == 5:
        raise ValueError("the sandbox did not answer")
    return float("nan") if calls > PER_STEP + 5 else float(len(solution_str) % 3)
