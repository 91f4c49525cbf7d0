"""Reading restart policies from their files, and rejecting invalid ones."""

import pytest

from post_training.recovery.policy import NEVER_RETRIED, Policy, PolicyError, read_policy

SEED = """retry_options:
  enable_retry: true
  max_retry_times: 5
  interval_seconds: 120
  policy_sets:
    - condition: "OOM"
      action: "reduce_batch_size"
    - condition: "network_error"
      action: "retry_with_backoff"
"""


@pytest.fixture
def written(tmp_path):
    def write(text):
        file = tmp_path / "policy.yaml"
        file.write_text(text, encoding="utf-8")
        return file

    return write


def test_the_published_options_are_the_usual_ones(written):
    policy = read_policy(written(SEED))
    assert policy == Policy()
    assert policy.actions["OOM"] == "reduce_batch_size" and policy.actions["worker_died"] == "retry"
    assert {policy.actions[cause] for cause in NEVER_RETRIED} == {"stop"}


def test_a_policy_says_what_it_wants_otherwise(written):
    text = SEED.replace("5", "2").replace("120", "0.5").replace('"retry_with_backoff"', "stop")
    policy = read_policy(written(text))
    assert (policy.max_retry_times, policy.interval_seconds) == (2, 0.5)
    assert policy.actions["network_error"] == "stop" and policy.actions["hang"] == "retry"


@pytest.mark.parametrize(
    "before, after, sentence",
    [
        ("retry_options", "retries", "must contain retry_options"),
        ("max_retry_times", "max_retries", "a key 'max_retries' (did you mean max_retry_times?)"),
        ("enable_retry: true", "enable_retry: 1", "enable_retry=1 is invalid"),
        ("times: 5", "times: -1", "max_retry_times=-1 is invalid"),
        ("times: 5", "times: true", "max_retry_times=True is invalid"),
        ("seconds: 120", "seconds: .nan", "interval_seconds=nan is invalid"),
        ("seconds: 120", "seconds: two", "interval_seconds='two' is invalid"),
        ('"OOM"', '"OMM"', "a condition is 'OMM' (did you mean OOM?)"),
        ('"OOM"', "reward_error", "the action for reward_error is 'reduce_batch_size', but it is never retried"),
        ('"network_error"', '"full_disk"', "the action for full_disk is 'retry_with_backoff', but it is never retried"),
        ('"retry_with_backoff"', '"reduce_batch_size"', "which only helps when a die ran out of memory"),
        ('"retry_with_backoff"', '"again"', "the action for network_error is 'again'"),
        ('      action: "retry_with_backoff"\n', "", "policy_sets has an invalid entry"),
        ("retry_options:", "retry_options: [", "is not YAML"),
    ],
)
def test_invalid_values_rejected_in_one_sentence(written, before, after, sentence):
    assert before in SEED
    file = written(SEED.replace(before, after, 1))
    with pytest.raises(PolicyError) as caught:
        read_policy(file)
    assert sentence in str(caught.value) and str(file) in str(caught.value) and "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(PolicyError, match="absent.yaml cannot be read: No such file"):
        read_policy(tmp_path / "absent.yaml")
