"""Steps in which the critic learns alone: its update ends them."""

from types import SimpleNamespace

import pytest

from verl_patches.features.critic.warmup import ending_warmup, ends_step, in_warmup


def trainer_at(step: int, warmup: int, **more):
    return SimpleNamespace(global_steps=step, config=SimpleNamespace(trainer={"critic_warmup": warmup}), **more)


@pytest.mark.parametrize(("warmup", "alone"), [(0, []), (1, []), (3, [1, 2])])
def test_the_steps_are_those_in_which_verl_leaves_the_actor(warmup, alone):
    """verl updates the actor where critic_warmup is at most the step's number, from 1."""
    assert [step for step in (1, 2, 3, 4) if in_warmup(trainer_at(step, warmup))] == alone


def test_the_critics_update_ends_the_steps_of_the_warm_up_alone():
    log = []
    workers = SimpleNamespace(update_critic=lambda batch: log.append(("update", ends_step(batch.meta_info))))
    trainer = trainer_at(1, 2, use_critic=True, critic_wg=workers)

    def noting(name):
        def ending(update):
            def run(batch):
                update(batch)
                log.append(name)

            return run

        return ending

    ending_warmup(trainer, noting("measured"))
    ending_warmup(trainer, noting("recorded"))
    batch = SimpleNamespace(meta_info={})
    workers.update_critic(batch)
    assert log == [("update", True), "measured", "recorded"]
    log.clear()
    trainer.global_steps = 2
    workers.update_critic(batch)
    assert log == [("update", False)]


def test_a_run_without_a_critic_is_left_as_it_is():
    ending_warmup(trainer_at(1, 2, use_critic=False), None)
    assert not ends_step({})
