"""A reward function that raises at its fifth call and returns NaN from its second step on."""

calls = 0
PER_STEP = 64


def compute_score(data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None) -> float:
    """Score the answer's length modulo 3. The batch with the failed call is scored again: its step makes 69 calls."""
    global calls
    calls += 1
    if calls == 5:
        raise ValueError("the sandbox did not answer")
    return float("nan") if calls > PER_STEP + 5 else float(len(solution_str) % 3)
