import pytest

from post_training.reshard.generation import WeightsGeneration, WeightsNotWholeError


def test_a_complete_set_may_be_used() -> None:
    weights = WeightsGeneration()
    weights.require_whole()
    for _ in range(2):
        with weights.writing():
            pass
        weights.require_whole()


def test_while_weights_are_written_nobody_generates() -> None:
    weights = WeightsGeneration()
    with weights.writing(), pytest.raises(WeightsNotWholeError, match="set 1 did not finish"):
        weights.require_whole()


def test_after_a_failure_only_a_complete_set_helps() -> None:
    weights = WeightsGeneration()
    with weights.writing():
        pass
    for _ in range(2):
        with pytest.raises(OSError), weights.writing():
            raise OSError("a rank died")
        with pytest.raises(WeightsNotWholeError, match="set 2 did not finish .the last complete one was 1.. Generate"):
            weights.require_whole()
    with weights.writing():
        pass
    weights.require_whole()


def test_weights_that_were_given_up_are_no_weights() -> None:
    weights = WeightsGeneration()
    weights.discard()
    weights.discard()
    with pytest.raises(WeightsNotWholeError, match="set 1 did not finish .the last complete one was 0."):
        weights.require_whole()
