"""The order of prompts after a resume is that of verl's own loader in an uninterrupted run."""

import pytest
import torch
from torch.utils.data import RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from verl_patches.features.data_order import order as data_order
from verl_patches.features.data_order.loader import ResumableLoader
from verl_patches.features.data_order.order import DataOrder, DataOrderError, PlacedSampler, place_state

SEED, EPOCHS = 7, 4


def upstreams_loader(rows, batch_size):
    """Return the loader that verl 0.4.0 builds over the numbers below `rows`."""
    generator = torch.Generator().manual_seed(SEED)
    sampler = RandomSampler(list(range(rows)), generator=generator)
    return StatefulDataLoader(list(range(rows)), batch_size=batch_size, sampler=sampler, drop_last=True)


def our_loader(rows, batch_size, seed=SEED, workers=0, total_steps=10**9):
    order = DataOrder(rows, batch_size, seed)
    sampler = PlacedSampler(lambda: order)
    batches = StatefulDataLoader(
        list(range(rows)), batch_size=batch_size, sampler=sampler, drop_last=True, num_workers=workers
    )
    return ResumableLoader(batches, sampler, order, total_steps)


def trained(loader, steps, epochs=EPOCHS):
    """Iterate as verl's loop does. Return (epoch, prompts) of up to `steps` steps and the loader's state at the end."""
    seen, state = [], loader.state_dict()
    for epoch in range(epochs):
        for batch in loader:
            seen.append((epoch, batch.tolist()))
            state = loader.state_dict()
            if len(seen) == steps:
                return seen, state
    return seen, state


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 3), (13, 3), (5, 4), (4, 4), (9, 1)])
def test_an_unbroken_run_has_upstreams_order(rows, batch_size):
    expected, _ = trained(upstreams_loader(rows, batch_size), 10**9)
    assert trained(our_loader(rows, batch_size), 10**9)[0] == expected
    orders = {str([prompts for epoch, prompts in expected if epoch == number]) for number in range(EPOCHS)}
    assert len(orders) == EPOCHS


@pytest.mark.parametrize(("rows", "batch_size"), [(12, 3), (13, 3)])
def test_a_resume_goes_on_as_the_unbroken_run_from_any_step(rows, batch_size):
    unbroken, _ = trained(upstreams_loader(rows, batch_size), 10**9)
    for cut in range(1, len(unbroken) + 1):
        _, state = trained(our_loader(rows, batch_size), cut)
        resumed = our_loader(rows, batch_size)
        resumed.load_state_dict(state)
        assert trained(resumed, 10**9)[0] == unbroken[cut:], f"cut after step {cut}"


def test_worker_processes_that_read_ahead_change_no_place():
    unbroken, _ = trained(our_loader(12, 3), 10**9)
    _, state = trained(our_loader(12, 3, workers=2), 6)
    resumed = our_loader(12, 3, workers=2)
    resumed.load_state_dict(state)
    assert trained(resumed, 10**9)[0] == unbroken[6:]


def test_upstreams_own_resume_repeats_the_first_epochs_order():
    """This is the upstream bug that the feature works around; once it is fixed, the feature can go."""
    unbroken, _ = trained(upstreams_loader(12, 3), 10**9)
    _, state = trained(upstreams_loader(12, 3), 6)
    resumed = upstreams_loader(12, 3)
    resumed.load_state_dict(state)
    assert [prompts for _, prompts in trained(resumed, 10**9)[0]] != [prompts for _, prompts in unbroken[6:]]


def test_the_first_epochs_permutation_in_every_epoch_is_noticed(monkeypatch):
    permutation = data_order.DataOrder.permutation
    monkeypatch.setattr(data_order.DataOrder, "permutation", lambda self, epoch: permutation(self, 0))
    with pytest.raises(AssertionError, match="cut after step"):
        test_a_resume_goes_on_as_the_unbroken_run_from_any_step(12, 3)


@pytest.mark.parametrize("resumed_after", [0, 3, 6, 7])
def test_no_step_is_trained_beyond_the_last(resumed_after):
    _, state = trained(our_loader(12, 3), resumed_after) if resumed_after else (None, our_loader(12, 3).state_dict())
    loader = our_loader(12, 3, total_steps=7)
    loader.load_state_dict(state)
    assert len(trained(loader, 10**9)[0]) == 7 - resumed_after


def test_without_a_shuffle_the_order_is_the_files():
    assert [prompts for _, prompts in trained(our_loader(5, 2, seed=None), 4)[0]] == [[0, 1], [2, 3]] * 2


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"rows": 13}, "data.train_files=13, but this run has 12"),
        ({"batch_size": 4}, "data.train_batch_size=4, but this run has 3"),
        ({"seed": 8}, "data.seed=8, but this run has 7"),
        ({"seed": None}, "data.seed=None, but this run has 7"),
        ({"position": 4}, "epoch 1 and row 4, does not exist in 12 rows"),
        ({"position": 12}, "epoch 1 and row 12, does not exist"),
        ({"epoch": -1}, "epoch -1 and row 3, does not exist"),
        ({"epoch": "x"}, "does not record how far"),
    ],
)
def test_a_place_of_other_data_rejected(change, sentence):
    state = our_loader(12, 3).state_dict() | {"epoch": 1, "position": 3}
    our_loader(12, 3).load_state_dict(state)
    with pytest.raises(DataOrderError, match=sentence):
        our_loader(12, 3).load_state_dict(state | change)
    with pytest.raises(DataOrderError, match="does not record how far"):
        our_loader(12, 3).load_state_dict({})


def test_the_state_is_numbers_that_json_can_hold():
    _, state = trained(our_loader(12, 3), 6)
    assert state == {"epoch": 1, "position": 6, "rows": 12, "batch_size": 3, "seed": SEED}
    assert place_state(data_order.Place(), DataOrder(12, 3, None))["seed"] is None


@pytest.mark.parametrize("shuffle", [True, False])
def test_verls_trainer_trains_in_its_own_order_and_resumes_in_it(shuffle):
    """verl's `_create_dataloader` is the reference: alone for the unbroken run, in our trainer for the resumed one."""
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

    from verl_patches.trainer.ppo.trainer import OverlayTrainer

    unbroken = trainer_of(RayPPOTrainer, shuffle)
    unbroken._create_dataloader(*unbroken.datasets, Batch, None)
    expected, _ = trained(unbroken.train_dataloader, 10**9)
    for cut in (1, 4, 5, 8, 10):
        first, resumed = trainer_of(OverlayTrainer, shuffle), trainer_of(OverlayTrainer, shuffle)
        for trainer in (first, resumed):
            trainer._create_dataloader(*trainer.datasets, Batch, None)
        before, state = trained(first.train_dataloader, cut)
        resumed.train_dataloader.load_state_dict(state)
        assert before + trained(resumed.train_dataloader, 10**9)[0] == expected
        assert resumed.total_training_steps == len(expected) == 16


class Batch(list):
    def tolist(self):
        return list(self)


def trainer_of(kind, shuffle):
    """Return the part of verl's trainer that makes loaders, for 4 epochs of 4 batches."""
    from omegaconf import OmegaConf

    data = {"train_batch_size": 3, "val_batch_size": None, "dataloader_num_workers": 0}
    data |= {"shuffle": shuffle, "seed": SEED}
    config = {"data": data, "trainer": {"total_epochs": EPOCHS, "total_training_steps": None}}
    config |= {"actor_rollout_ref": {"rollout": {"n": 1}}}
    trainer = object.__new__(kind)
    trainer.config, trainer.datasets = OmegaConf.create(config), (list(range(13)), list(range(2)))
    return trainer
