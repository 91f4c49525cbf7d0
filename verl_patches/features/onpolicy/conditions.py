"""The conditions under which the log-prob of the update's own forward equals old_log_prob."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from post_training import one_update


def reason_old_log_prob_is_needed(config: Mapping[str, Any]) -> str | None:
    """Return why this run needs a recomputed old_log_prob, as the end of a sentence; None if it does not.

    Args:
        config: verl's composed configuration.
    """
    data, filtered = config["data"], (config["algorithm"].get("filter_groups") or {}).get("enable")
    # With filtered prompts, gen_batch_size is the size of a generation batch and not of the training batch.
    prompts = data["train_batch_size"] if filtered else data.get("gen_batch_size") or data["train_batch_size"]
    return one_update.reason_old_log_prob_is_needed(config, prompts)
