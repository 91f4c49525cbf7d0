"""Steps in which only the critic trains end with the critic's update."""

from types import SimpleNamespace

import pytest

from verl_patches.features.critic.warmup import ending_warmup, ends_step, in_warmup


def trainer_at(step: int, warmup: int, **more):
    return SimpleNamespace(global_steps=step, config=SimpleNamespace(trainer={"critic_warmup": warmup}), **more)


@pytest.mark.parametrize(("warmup", "alone"), [(0, []), (1, []), (3, [1, 2])])
def test_the_steps_are_those_in_which_verl_leaves_the_actor(warmup, alone):
    """verl updates the actor once the step number, counted from 1, has reached critic_warmup."""
    assert [step for step in (1, 2, 3, 4) if in_warmup(trainer_at(step, warmup))] == alone


def test_the_critics_update_ends_the_steps_of_the_warm_up_alone():
    log = []
    trainer = trainer_at(1, 2)

    def noting(name):
        def ending(update):
            def run(batch):
                update(batch)
                log.append(name)

            return run

        return ending

    def update(batch):
        log.append(("update", ends_step(batch.meta_info)))

    for name in ("measured", "recorded"):
        update = ending_warmup(trainer, noting(name))(update)
    batch = SimpleNamespace(meta_info={})
    update(batch)
    assert log == [("update", True), "measured", "recorded"]
    log.clear()
    trainer.global_steps = 2
    update(batch)
    assert log == [("update", False)]


def test_an_update_of_another_batch_ends_no_step():
    assert not ends_step({})
