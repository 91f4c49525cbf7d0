"""Steps that could not be replayed are rejected by one function, in `--check` and in the trainers."""

from __future__ import annotations

import pytest

from tests.stack_2026.verl.test_jobs import MODELS, ONE_CARD
from verl_plugin.jobs import JobError, check_job, compose_job
from verl_plugin.step_record.checks import MOST, STEPS
from verl_plugin.trainer_modes import MODE_KEY, MODULES_KEY, RECORDED, REGISTRATION

# A later override of the same key wins.
ON = (f"{MODE_KEY}={RECORDED}", f"++{MODULES_KEY}={REGISTRATION}", f"+{STEPS}=[1,3]", "trainer.save_freq=2")
ACCEPTED = [(), ("trainer.save_freq=1",), (f"+{STEPS}=[1]", "trainer.save_freq=-1"), (f"+{STEPS}=[]",)]
REJECTED = [
    (f"{MODE_KEY}=sync", f"{STEPS}=[1, 3] is invalid: the trainer {MODE_KEY}=sync records nothing"),
    (f"++{STEPS}=[0]", "0 is not a step"),
    (f"++{STEPS}=[true]", "True is not a step"),
    (
        "trainer.save_freq=-1",
        "no checkpoint has the weights at the beginning of step 3, because trainer.save_freq is -1",
    ),
    ("trainer.save_freq=20", "or trainer.save_freq to a divisor of 2"),
    (f"++{MODULES_KEY}=json", f"{MODULES_KEY}=json is invalid"),
    (f"++{MOST}=0", f"{MOST}=0 is invalid: not a size in MiB. Set it to a number above 0"),
]


@pytest.mark.parametrize("overrides", ACCEPTED, ids=str)
def test_jobs_record_steps_whose_weights_are_saved(overrides):
    keys = [*ON, *(each.replace("+", "++", 1) if each[0] == "+" else each for each in overrides)]
    check_job(compose_job(ONE_CARD, keys), MODELS[ONE_CARD])


@pytest.mark.parametrize(("override", "says"), REJECTED)
def test_step_that_cannot_be_made_again_is_rejected_in_check_and_trainer(override, says):
    from verl.trainer.ppo.v1 import get_trainer_cls

    import verl_plugin.step_record.trainer  # noqa: F401

    config = compose_job(ONE_CARD, [*ON, override])
    with pytest.raises(JobError) as caught:
        check_job(config, MODELS[ONE_CARD])
    assert says in str(caught.value)
    with pytest.raises(ValueError) as again:
        get_trainer_cls(RECORDED)(config)
    assert str(again.value) == str(caught.value)
