"""A worker checks the model's folder as the driver does, for the number of dies of the whole run."""

import pytest

from overlay import ConfigurationError
from verl_patches.workers import model_check


def test_worker_checks_the_model_for_all_dies_of_the_run(monkeypatch):
    asked = []

    def model_findings(values, use):
        asked.append((values, use.dies, use.serves, use.backend))
        return ["first", "second"]

    monkeypatch.setenv("WORLD_SIZE", "32")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    monkeypatch.setattr(model_check, "model_findings", model_findings)
    monkeypatch.setattr(model_check, "backend_of", lambda config: "megatron")
    monkeypatch.setattr(model_check, "described", {"/model": {"name": "a"}}.get)
    with pytest.raises(ConfigurationError, match="^first$"):
        model_check.check_workers_model({"model": {"path": "/model"}})
    assert asked == [({"name": "a"}, 32, True, "megatron")]
    model_check.check_workers_model({"model": {"path": "/absent"}})
    assert len(asked) == 1
