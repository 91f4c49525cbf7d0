"""The hooks record every token, on stand-ins for Megatron's and vLLM's models.

Tokens of these models do not attend to each other, so a row of every point is a function of its token alone.
"""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from post_training.layouts.layout import LayerSlot
from post_training.mismatch import points
from post_training.mismatch.dumps import TokenSequence, merged
from post_training.mismatch.points import of_layer
from post_training.mismatch.recording import Recorder, recorded_rollout, recorded_training

VOCABULARY, WIDTH, EXPERTS, CHOSEN, LAYERS = 20, 4, 8, 2, 2
SEQUENCES = [TokenSequence((3, 4, 5), (6, 7)), TokenSequence((8,), (9, 10, 11)), TokenSequence((3, 4, 5), (12,))]
TOKENS = torch.tensor([token for each in SEQUENCES for token in each.tokens])
RESPONSES = [2, 3, 5, 6, 7, 11]
WEIGHTS = [torch.randn(WIDTH, WIDTH, generator=torch.Generator().manual_seed(seed)) for seed in range(4)]
TABLE = torch.randn(VOCABULARY, WIDTH, generator=torch.Generator().manual_seed(9))
GATE = torch.randn(EXPERTS, WIDTH, generator=torch.Generator().manual_seed(8))


class Apply(nn.Module):
    """Module that applies one function."""

    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *arguments, **options):
        return self.function(*arguments, **options)


def expected():
    """Return the expected values of every point for all tokens."""
    found, hidden = {points.EMBEDDING: TABLE[TOKENS]}, TABLE[TOKENS]
    for layer in range(LAYERS):
        attention = hidden * 2 @ WEIGHTS[layer]
        after = hidden + attention
        mlp = after * 3 @ WEIGHTS[2 + layer]
        logits = after * 3 @ GATE.T
        values = (hidden * 2, attention, after, after * 3, logits, logits.topk(CHOSEN).indices, mlp, after + mlp)
        found |= {of_layer(layer, part): value for part, value in zip(points.OF_A_LAYER, values, strict=True)}
        hidden = after + mlp
    found[points.FINAL_NORM] = hidden / 2
    return found | {points.LOGITS: (hidden / 2 @ TABLE.T)[RESPONSES]}


def check(parts):
    found, replicas = merged(parts)
    wanted = expected()
    assert found.keys() == wanted.keys() and not replicas
    for point, captured in found.items():
        assert captured.rows.tolist() == (RESPONSES if point == points.LOGITS else list(range(len(TOKENS)))), point
        if point.endswith(points.EXPERTS):
            assert torch.equal(captured.values.sort().values, wanted[point].sort().values), point
        else:
            torch.testing.assert_close(captured.values, wanted[point])


# ---- training


def megatron(rank, ranks):
    """Make a tensor-parallel rank: its share of the tokens in the layers, a share of the vocabulary at the output."""

    def layer(number):
        router = Apply(lambda tokens: (None, (tokens @ GATE.T).topk(CHOSEN).indices))
        router.weight = nn.Parameter(GATE)
        mlp = Apply(lambda x: (router(x.flatten(0, 1)), (x @ WEIGHTS[2 + number], None))[1])
        mlp.router = router
        norm, norm_before_mlp = Apply(lambda x: x * 2), Apply(lambda x: x * 3)
        for each in (norm, norm_before_mlp):
            each.weight = nn.Parameter(torch.ones(1))
        attention = Apply(lambda x: (x @ WEIGHTS[number], None))

        def forward(x):
            x = x + attention(norm(x))[0]
            return x + mlp(norm_before_mlp(x))[0], None

        made = Apply(forward)
        made.input_layernorm, made.self_attention, made.pre_mlp_layernorm, made.mlp = (
            norm,
            attention,
            norm_before_mlp,
            mlp,
        )
        return made

    decoder = nn.Module()
    decoder.layers, decoder.final_layernorm = nn.ModuleList(map(layer, range(LAYERS))), Apply(lambda x: x / 2)
    embedding = Apply(lambda ids: TABLE[ids].chunk(ranks)[rank].unsqueeze(1))
    columns = TABLE.chunk(ranks)[rank]

    def output(hidden):
        return hidden @ columns.T, None

    def forward(input_ids, packed_seq_params):
        x = embedding(input_ids[0])
        for each in decoder.layers:
            x, _ = each(x)
        decoder.final_layernorm(x)
        # Values of other ranks would come by a collective, and pass no hook of this rank.
        whole = TABLE[input_ids[0]].unsqueeze(1)
        for layer in range(LAYERS):
            whole = whole + whole * 2 @ WEIGHTS[layer]
            whole = whole + whole * 3 @ WEIGHTS[2 + layer]
        return model.output_layer(whole / 2)

    model = Apply(forward)
    model.embedding, model.decoder, model.output_layer = embedding, decoder, Apply(output)
    return model


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("batches", [[SEQUENCES], [SEQUENCES[:1], SEQUENCES[1:]]])
def test_training_is_recorded_token_by_token(ranks, batches):
    """Pad sequences to a multiple of the ranks, and split them into micro batches."""
    parts = []
    slots = [LayerSlot(layer, 0, layer) for layer in range(LAYERS)]
    for rank in range(ranks):
        model, recorder = megatron(rank, ranks), Recorder(SEQUENCES)
        with torch.no_grad(), recorded_training([model], slots, rank, ranks, VOCABULARY, recorder):
            for batch in batches:
                padded = [list(each.tokens) + [0] * (-len(each.tokens) % ranks) for each in batch]
                edges = torch.tensor([0, *map(len, padded)]).cumsum(0)
                ids = torch.tensor([[token for each in padded for token in each]])
                model(input_ids=ids, packed_seq_params=SimpleNamespace(cu_seqlens_q_padded=edges))
        assert not model.embedding._forward_hooks and not model._forward_pre_hooks
        parts.append(recorder.part())
    check(parts)


def test_batches_that_are_not_packed_rejected():
    model = megatron(0, 1)
    with (
        recorded_training([model], [], 0, 1, VOCABULARY, Recorder(SEQUENCES)),
        pytest.raises(RuntimeError, match="pack"),
    ):
        model(input_ids=torch.zeros(1, 1), packed_seq_params=None)


# ---- rollout


class Runner:
    """A stand-in for vLLM-Ascend's model runner, as far as the hooks use it. It routes each half of the rows by itself.

    As in its Qwen2, the sum over tensor-parallel ranks, here two equal shares, is outside of attention and MLP.
    """

    def __init__(self, operators):
        self.operators = operators
        self.input_batch, self.requests = SimpleNamespace(req_ids=[]), {}
        self.sampler = Apply(lambda logits, sampling_metadata: self.sampler.sample(logits, sampling_metadata))
        self.sampler.sample = lambda logits, sampling_metadata: pytest.fail("it sampled")
        self.model = Apply(self._forward)
        self.model.model = decoder = nn.Module()
        decoder.embed_tokens, decoder.norm = (
            Apply(lambda ids: TABLE[ids]),
            Apply(lambda x, residual: ((x + residual) / 2, 0)),
        )
        decoder.layers = nn.ModuleList(map(self._layer, range(LAYERS)))

    def get_model(self):
        return self.model

    def _layer(self, number):
        gate = Apply(lambda x: (x @ GATE.T, None))

        def mlp(x):
            logits, _ = gate(x)
            for half in nn.functional.pad(logits, (0, 0, 0, len(logits) % 2)).chunk(2):
                self.operators.npu_moe_gating_top_k(half, k=CHOSEN)
            return x @ WEIGHTS[2 + number] / 2

        def forward(x, residual):
            if residual is not None:
                residual, x = residual + x, residual + x
            residual, x = (x if residual is None else residual), made.input_layernorm(x)
            x, residual = made.post_attention_layernorm(made.self_attn(x) * 2, residual)
            return made.mlp(x) * 2, residual

        made = Apply(forward)
        made.input_layernorm, made.self_attn = Apply(lambda x: x * 2), Apply(lambda x: x @ WEIGHTS[number] / 2)
        made.post_attention_layernorm = Apply(lambda x, residual: ((x + residual) * 3, x + residual))
        made.mlp = Apply(mlp)
        made.mlp.gate = gate
        return made

    def _forward(self, input_ids, positions):
        x, residual = self.model.model.embed_tokens(input_ids), None
        for layer in self.model.model.layers:
            x, residual = layer(x, residual)
        return self.model.model.norm(x, residual)[0]

    def _dummy_run(self, tokens):
        self.model(input_ids=torch.ones(tokens, dtype=torch.long), positions=torch.zeros(tokens, dtype=torch.long))

    def step(self, scheduled):
        """Run one forward of (request, first position, token ids) and a padding row; return each request's sample."""
        self.input_batch.req_ids = [name for name, _, _ in scheduled]
        self.query_start_loc = torch.tensor([0, *(len(ids) for _, _, ids in scheduled), -1])
        self.query_start_loc[:-1] = self.query_start_loc[:-1].cumsum(0)
        ids = torch.tensor([token for _, _, ids in scheduled for token in ids] + [1])
        positions = torch.tensor([first + place for _, first, ids in scheduled for place in range(len(ids))] + [0])
        hidden = self.model(input_ids=ids, positions=positions)
        logits = hidden[self.query_start_loc[1:-1] - 1] @ TABLE.T
        return dict(
            zip(self.input_batch.req_ids, self.sampler(logits=logits, sampling_metadata=None).tolist(), strict=True)
        )


@pytest.fixture
def runner(monkeypatch):
    """A runner whose operators are where vLLM-Ascend looks for them."""
    operators = SimpleNamespace(npu_moe_gating_top_k=lambda logits, k: (None, logits.topk(k).indices, None))
    monkeypatch.setitem(sys.modules, "torch_npu", operators)
    modules = SimpleNamespace(fused_moe=SimpleNamespace(), common_fused_moe=SimpleNamespace())
    monkeypatch.setitem(sys.modules, "vllm_ascend", SimpleNamespace(ops=modules))
    monkeypatch.setitem(sys.modules, "vllm_ascend.ops", modules)
    return Runner(operators)


def generated(runner, recorder, sequences, first=40):
    """Prefill in two chunks, decode until the longest response is complete, and return sampled tokens by request."""
    names = [str(first + place) for place in range(len(sequences))]
    prompts = [SEQUENCES[index % len(SEQUENCES)].prompt for index in sequences]
    for name in names:
        runner.requests[name] = SimpleNamespace(output_token_ids=[])
    with torch.no_grad(), recorded_rollout(runner, sequences, first, recorder):
        runner.step([(name, 0, prompt[:1]) for name, prompt in zip(names, prompts, strict=True) if len(prompt) > 1])
        runner._dummy_run(2)
        chosen = runner.step(
            [(name, min(1, len(p) - 1), p[min(1, len(p) - 1) :]) for name, p in zip(names, prompts, strict=True)]
        )
        for _ in range(3):
            for name, token in chosen.items():
                runner.requests[name].output_token_ids.append(token)
            outputs = {name: runner.requests[name].output_token_ids for name in names}
            chosen = runner.step(
                [
                    (name, len(p) + len(outputs[name]) - 1, outputs[name][-1:])
                    for name, p in zip(names, prompts, strict=True)
                ]
            )
    return outputs


def test_the_rollout_is_recorded_token_by_token_and_given_the_responses(runner):
    recorder = Recorder(SEQUENCES)
    outputs = generated(runner, recorder, [0, 1, 2, 3])  # the fourth is only padding
    assert [outputs[str(40 + index)][: len(each.response)] for index, each in enumerate(SEQUENCES)] == [
        list(each.response) for each in SEQUENCES
    ]
    part = recorder.part()
    check([part])
    assert not runner.model._forward_hooks and "_dummy_run" not in vars(runner)
    with pytest.raises(pytest.fail.Exception):
        runner.sampler(logits=torch.zeros(1, VOCABULARY), sampling_metadata=None)


def test_engines_record_their_own_sequences(runner):
    parts = []
    for engine in ([0, 1], [2, 3]):
        recorder = Recorder(SEQUENCES)
        generated(runner, recorder, engine, first=7)
        parts.append(recorder.part())
    assert set(parts[0][points.EMBEDDING, 0].rows.tolist()) == set(range(9))
    check(parts)
