"""The learning rate of every step equals that of transformers' schedulers and of verl's FSDP workers."""

import math
from types import SimpleNamespace

import pytest
import torch

from verl_patches.features.learning_rate.rate_schedule import Schedule
from verl_patches.features.learning_rate.rates import STEP, report_rate, sending_step, set_rate

PEAK, TOTAL = 3e-6, 23


def optim(style, **changes):
    keys = {"lr": PEAK, "warmup_style": style, "total_training_steps": TOTAL, "min_lr_ratio": None}
    return keys | {"lr_warmup_steps": -1, "lr_warmup_steps_ratio": 0.0} | changes


def rates(keys, steps=TOTAL):
    return [Schedule.of(keys).rate(step) for step in range(1, steps + 1)]


def rates_of_scheduler(make, steps=TOTAL):
    """Return the rates of the torch scheduler from `make` at each step, advanced as verl's FSDP worker does."""
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=PEAK)
    scheduler, found = make(optimizer), []
    for _ in range(steps):
        found.append(scheduler.get_last_lr()[0])
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.parametrize("warmup", [0, 1, 5, TOTAL, TOTAL + 4])
def test_as_transformers_schedules(warmup):
    import transformers

    for style, make in (
        ("constant", lambda o: transformers.get_constant_schedule_with_warmup(o, warmup)),
        ("linear", lambda o: transformers.get_linear_schedule_with_warmup(o, warmup, TOTAL)),
        ("cosine", lambda o: transformers.get_cosine_schedule_with_warmup(o, warmup, TOTAL)),
    ):
        expected = rates_of_scheduler(make, TOTAL + 3) if style != "cosine" else rates_of_scheduler(make)
        found = rates(optim(style, lr_warmup_steps=warmup), len(expected))
        assert found == pytest.approx(expected, rel=1e-12, abs=1e-20), style


@pytest.mark.parametrize(
    ("given", "style", "warmup", "total", "ratio"),
    [
        ({}, "constant", 0, -1, 0.0),
        ({"total_training_steps": 10, "lr_warmup_steps_ratio": 0.3}, "constant", 3, 10, 0.0),
        ({"total_training_steps": 10, "lr_warmup_steps_ratio": 0.3, "lr_warmup_steps": 0}, "constant", 0, 10, 0.0),
        ({"lr_warmup_steps": 4, "warmup_style": "cosine", "min_lr_ratio": 0.1}, "cosine", 4, -1, 0.1),
        ({"lr_warmup_steps_ratio": 0.5}, "constant", 0, -1, 0.0),
    ],
)
def test_omitted_values_match_verls_defaults(given, style, warmup, total, ratio):
    assert Schedule.of({"lr": PEAK, **given}) == Schedule(PEAK, style, warmup, total, ratio)


@pytest.mark.parametrize("ratio", [None, 0.0, 0.1, 1.0])
@pytest.mark.parametrize("warmup", [0, 4])
def test_as_verls_schedules(warmup, ratio):
    from verl.utils import torch_functional

    expected = rates_of_scheduler(
        lambda o: torch_functional.get_cosine_schedule_with_warmup(o, warmup, TOTAL, min_lr_ratio=ratio)
    )
    assert rates(optim("cosine", lr_warmup_steps=warmup, min_lr_ratio=ratio)) == pytest.approx(expected, rel=1e-12)
    expected = rates_of_scheduler(lambda o: torch_functional.get_constant_schedule_with_warmup(o, warmup))
    # verl's constant schedule has no minimum, whatever the key says.
    constant = optim("constant", lr_warmup_steps=warmup, min_lr_ratio=ratio)
    assert rates(constant) == pytest.approx(expected, rel=1e-12)


def test_a_linear_schedule_ends_at_its_minimum_and_stays_there():
    found = rates(optim("linear", lr_warmup_steps=3, min_lr_ratio=0.25), TOTAL + 5)
    assert found[0] == found[TOTAL] == found[-1] == PEAK * 0.25 and max(found) == found[3] == PEAK
    falls = [earlier - later for earlier, later in zip(found[3:TOTAL], found[4 : TOTAL + 1], strict=True)]
    assert falls == pytest.approx([PEAK * 0.75 / 20] * 20, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "warmup"),
    [
        ({"lr_warmup_steps_ratio": 0.3}, 6),
        ({"lr_warmup_steps_ratio": 0.3, "lr_warmup_steps": 2}, 2),
        ({"lr_warmup_steps_ratio": 0.3, "lr_warmup_steps": 0}, 0),
        ({}, 0),
    ],
)
def test_the_warm_up_is_read_as_verl_reads_it(changes, warmup):
    assert Schedule.of(optim("cosine", **changes)).warmup_steps == warmup


def optimizer_of(*groups):
    return SimpleNamespace(param_groups=[dict(group) for group in groups])


def test_every_group_has_the_rate_of_the_step_whatever_it_had_before():
    """The schedule has no state: a step's rate does not depend on the step before, so a resume changes nothing."""
    keys = optim("cosine", lr_warmup_steps=3)
    optimizer = optimizer_of({"lr": 5.0, "lr_mult": 1.0}, {"lr": 5.0, "lr_mult": 0.5}, {"lr": 5.0})
    for step in (7, 2, TOTAL, 7):
        set_rate(optimizer, keys, {STEP: step})
        expected = Schedule.of(keys).rate(step)
        assert [group["lr"] for group in optimizer.param_groups] == [expected, expected * 0.5, expected]
    metrics = {}
    report_rate(optimizer, metrics)
    assert metrics == {"actor/lr": Schedule.of(keys).rate(7)}
    report_rate(optimizer_of(), metrics := {})
    assert metrics == {}


def test_a_constant_rate_needs_no_step_and_is_the_configured_one_to_the_bit():
    optimizer = optimizer_of({"lr": 0.0, "lr_mult": 1.0})
    set_rate(optimizer, optim("constant"), {})
    assert optimizer.param_groups[0]["lr"] == PEAK
    with pytest.raises(KeyError):
        set_rate(optimizer, optim("linear"), {})


def test_rate_restarted_by_a_resume_detected():
    """This is the error of a stateful schedule that loses its state."""
    unbroken = rates(optim("linear", lr_warmup_steps=3))
    restarted = [*unbroken[:8], *rates(optim("linear", lr_warmup_steps=3))[: TOTAL - 8]]
    assert restarted != unbroken and not any(map(math.isnan, unbroken))


def test_the_driver_sends_the_step_with_the_batch():
    step, batch = 4, SimpleNamespace(meta_info={"micro_batch_size": 1})
    send = sending_step(lambda given: dict(given.meta_info), lambda: step)
    assert send(batch) == {"micro_batch_size": 1, STEP: 4}
