"""Training weights with NaN on a single rank end the run on all ranks before another step is wasted."""

import re

import pytest

from tests.worker_processes import jobs
from tests.worker_processes.conftest import PROMPTS
from tests.worker_processes.processes import RANKS, RemoteError


@pytest.mark.parametrize("rank", [0, RANKS - 1])
def test_weights_that_no_update_can_mend_are_named_on_every_rank(workers, rank):
    workers.run(jobs.rollout, PROMPTS)
    workers.run(jobs.old_log_prob)
    workers.run(jobs.reference_log_prob)
    workers.run(jobs.spoil_weight, rank)
    with pytest.raises(RemoteError) as caught:
        workers.run(jobs.update)
    said = r"after a skipped update, the actor's weights contain inf or nan in \S+ \(rank (\d)\); begin from"
    assert set(re.findall(said, str(caught.value))) == {str(rank)}
    assert str(list(range(RANKS))) in str(caught.value), "every rank raises the same sentence"
