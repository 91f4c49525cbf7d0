"""Records which experts vLLM-Ascend's model runner chooses.

Forwards of captured graphs run no Python and record nothing. With torchair graphs only prompts are compared, which
vLLM-Ascend computes outside its decode graphs; with ACL graphs nothing is compared.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import nn

from post_training.mismatch.recording import DummyRuns, recorded_rollout_choices
from verl_patches.features.expert_sets.keys import PrefixKey, drawn
from verl_patches.features.expert_sets.records import ChoiceRecorder


class RunnerChoices:
    """Hooks around each forward of a model runner, which record the tokens it computes and their routers' choices."""

    def __init__(self, runner: Any, recorder: ChoiceRecorder, share: float) -> None:
        self._runner, self._recorder, self._share = runner, recorder, share
        self._prefixes: dict[str, PrefixKey] = {}
        self._dummy_runs = DummyRuns()
        self._forward = ExitStack()

    def install(self) -> bool:
        """Install the hooks on the runner's model; return False for a model without routers."""
        model = self._runner.get_model()
        if not any(getattr(layer.mlp, "gate", None) is not None for layer in model.model.layers):
            return False
        model.register_forward_pre_hook(self._begin)
        model.register_forward_hook(self._end, always_call=True)
        self._runner._dummy_run = self._dummy_runs.watched(self._runner._dummy_run)
        return True

    def _begin(self, model: nn.Module, arguments: Any) -> None:
        if torch.compiler.is_compiling() or self._dummy_runs.running or self._runs_graph():
            return
        keys = np.array(self._keys(), dtype=np.uint64)
        if self._recorder.begin(keys, drawn(keys, self._share)):
            self._forward.enter_context(recorded_rollout_choices(model.model, self._recorder))

    def _end(self, model: nn.Module, arguments: Any, output: Any) -> None:
        if not torch.compiler.is_compiling():
            self._recorder.end()
            self._forward.close()

    def _runs_graph(self) -> bool:
        """Return whether the forward is a torchair graph, which a hook on one of its operators would recompile."""
        from vllm.forward_context import get_forward_context

        return self._runner.torchair_graph_enabled and not get_forward_context().with_prefill

    def _keys(self) -> list[int]:
        """Return the keys of the forward's rows, request by request in the order of the batch."""
        batch, keys = self._runner.input_batch, []
        names = batch.req_ids[: batch.num_reqs]
        edges = self._runner.query_start_loc_cpu[: len(names) + 1].tolist()
        prefixes: dict[str, PrefixKey] = {}
        for index, name in enumerate(names):
            rows = edges[index + 1] - edges[index]
            computed = int(batch.num_computed_tokens_cpu[index])
            prefix = self._prefixes.get(name)
            if prefix is None or prefix.count > computed:  # a new request, or one that was preempted
                prefix = PrefixKey()
            # A prefix that is already in the KV cache is not computed, so it has no rows.
            prefix.advance(batch.token_ids_cpu[index, prefix.count : computed].tolist())
            keys += prefix.advance(batch.token_ids_cpu[index, computed : computed + rows].tolist())
            prefixes[name] = prefix
        self._prefixes = prefixes
        return keys
