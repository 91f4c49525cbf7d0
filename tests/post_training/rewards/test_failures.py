import pytest

from post_training.rewards import failures
from verl_patches.trainer.ppo import reward


@pytest.fixture(autouse=True)
def none_left():
    failures.take()
    yield
    failures.take()


class Sometimes:
    """Reward manager that fails on the given calls, for upstream's loop that retries once."""

    def __init__(self, *failing):
        self.calls, self.failing = 0, failing

    def __call__(self, data, **options):
        self.calls += 1
        if self.calls in self.failing:
            raise ValueError("no answer\nfrom the sandbox")
        return "scores"


def upstream(data, reward_fn):
    """Call the reward function like verl, with one retry."""
    try:
        return reward_fn(data, return_dict=True), {}
    except Exception:
        return reward_fn(data), {}


def test_a_failure_that_verl_passes_over_is_counted():
    with failures.counted():
        assert reward.compute_reward(upstream, "data", Sometimes(1)) == ("scores", {})
        assert failures.take() == ["ValueError: no answer"]
        assert reward.compute_reward(upstream, "data", Sometimes()) == ("scores", {})
        assert failures.take() == []


def test_a_second_failure_is_one_sentence():
    with failures.counted(), pytest.raises(failures.RewardError, match=r"^the reward function failed twice \(ValueE"):
        reward.compute_reward(upstream, "data", Sometimes(1, 2))
    assert len(failures.take()) == 2


def test_uncounted_failure_is_raised():
    with pytest.raises(failures.RewardError, match=r"failed \(ValueError: no answer\)"):
        reward.compute_reward(upstream, "data", Sometimes(1))


def test_first_of_several_pending_errors_reported():
    failures.note("first")
    failures.note("second")
    with pytest.raises(failures.RewardError, match=r"failed \(first\)"):
        failures.require_nobody_missed()


def test_an_exception_without_text_has_its_type():
    assert failures.in_words(KeyError()) == "KeyError"
