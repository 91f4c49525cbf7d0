"""Compare MindSpeed's permutation of tokens, and its sorting of chunks of them, with Megatron-core's.

Prints JSON. Of the sorting: whether outputs and gradients are equal, and whether the map is the one that MindSpeed's
kernel computes in Triton's interpreter. Of the permutation of bfloat16 tokens with float32 weights: whether outputs and
gradients are equal as this project's bridge wraps it, and whether it rounds the weights without the wrapper.
"""

import json
from itertools import pairwise
from typing import Any

import torch
import torch_npu  # noqa: F401

# isort: split
import mindspeed.megatron_adaptor  # noqa: F401  (before Megatron-core)

# isort: split
from megatron.core.transformer.moe.moe_utils import sort_chunks_by_idxs
from mindspeed.core.fusions.fused_moe_permute import permute
from mindspeed.ops.triton import sort_chunks_by_idx as mindspeed_sort

from npu_emulator.triton_bridge import InterpretedKernel
from verl_plugin.mindspeed import keeping_weights_wrapper

# Lengths of chunks, some of them empty, for four experts from three ranks; and the order by expert.
SIZES = torch.tensor([3, 0, 5, 1, 0, 0, 7, 2, 4, 1, 0, 6])
ORDER = torch.arange(12).reshape(3, 4).T.ravel()
HIDDEN = 6


def interpreted_map() -> torch.Tensor:
    """Return the map as MindSpeed's kernel computes it, with the arguments that its launcher gives it."""
    tokens, chunks = int(SIZES.sum()), len(SIZES)
    kernel = InterpretedKernel(mindspeed_sort._make_chunk_sort_map_kernel.fn.fn)
    inverse = torch.empty(chunks, dtype=torch.int32)
    inverse[ORDER] = torch.arange(chunks, dtype=torch.int32)
    starts = [torch.cat([torch.zeros(1, dtype=torch.int32), each.cumsum(0).int()]) for each in (SIZES, SIZES[ORDER])]
    found = torch.empty(tokens, dtype=torch.int32).npu()
    arguments = (SIZES.npu(), starts[0].npu(), inverse.npu(), starts[1].npu(), found, chunks, tokens, 1)
    kernel[(tokens,)](*arguments, SUB_BLOCK_SIZE=8, IDX_LOAD_WIDTH=16)
    return found.cpu()


def permuted(permute: Any, fused: bool) -> list[torch.Tensor]:
    """Return rows and weights by expert, and the gradients of tokens and weights."""
    generator = torch.Generator().manual_seed(6)
    tokens, weights = torch.randn(5, HIDDEN, generator=generator).bfloat16(), torch.rand(5, 4, generator=generator)
    chosen = torch.rand(5, 4, generator=generator).argsort(dim=1) < 2
    given = [tokens.npu().requires_grad_(), weights.npu().requires_grad_()]
    count = int(chosen.sum())
    found = permute(given[0], chosen.npu(), probs=given[1] * chosen.npu(), num_out_tokens=count, fused=fused)[:2]
    gradients = torch.randn(count, HIDDEN, generator=generator).bfloat16(), torch.rand(count, generator=generator)
    torch.autograd.backward(found, [each.to(output.dtype).npu() for each, output in zip(gradients, found, strict=True)])
    return [*found, *(each.grad for each in given)]


def main() -> None:
    generator = torch.Generator().manual_seed(5)
    tokens = int(SIZES.sum())
    rows, weights, gradient = (
        torch.randn(shape, generator=generator) for shape in ((tokens, HIDDEN), tokens, (tokens, HIDDEN))
    )
    results = []
    for fused in (False, True):
        given = [each.npu().requires_grad_() for each in (rows, weights)]
        if fused:
            found = mindspeed_sort.moe_sort_chunks_by_index_with_probs(*given, SIZES.npu(), ORDER.npu())
        else:
            found = sort_chunks_by_idxs(given[0], SIZES.npu(), ORDER.npu(), probs=given[1])
        torch.autograd.backward(found, (gradient.npu(), gradient[:, 0].npu()))
        alone = mindspeed_sort.moe_sort_chunks_by_index(given[0].detach(), SIZES.npu(), ORDER.npu())
        results.append([*found, *(each.grad for each in given), alone])
    expected, found = results
    own = mindspeed_sort.make_chunk_sort_map(SIZES.npu(), ORDER.npu(), tokens, len(SIZES)).cpu()
    wrapped, unwrapped = (permuted(each, fused=True) for each in (keeping_weights_wrapper(permute), permute))
    megatrons = permuted(permute, fused=False)
    facts = {
        "equal": [torch.equal(a, b) for a, b in zip(expected, found, strict=True)],
        "alone": torch.equal(found[0], found[-1]),
        "interpreted": torch.equal(own, interpreted_map()),
        "permuted": [a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(wrapped, megatrons, strict=True)],
        "rounds": unwrapped[1].dtype == torch.bfloat16 and not torch.equal(unwrapped[1].float(), megatrons[1]),
        "moved": any(b != a + 1 for a, b in pairwise(own.tolist())),
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main()
