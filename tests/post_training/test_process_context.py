"""A process context creates each kind of state once, and workers of the process share it."""

from post_training.process_context import ProcessContext, process_context
from verl_patches.features.critic.tokens import LastForward, last_forward
from verl_patches.features.expert_sets.records import StepChoices, process_choices


def test_process_context_keeps_one_object_per_kind():
    context = ProcessContext()
    first = context.of(StepChoices)
    assert context.of(StepChoices) is first and context.of(LastForward) is not first
    assert ProcessContext().of(StepChoices) is not first


def test_features_keep_theirs_in_the_context_of_the_process():
    assert last_forward() is process_context().of(LastForward)
    assert process_choices() is process_context().of(StepChoices)
