import pytest
import torch
import torch_npu
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional

from tests.npu_emulator.operators.compare import assert_like_reference


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


def rms(x, gamma, epsilon=1e-6):
    return functional.rms_norm(x, gamma.shape, gamma, epsilon)


def test_rms_norm_and_its_gradient():
    assert_like_reference(
        lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-6)[0], rms, [torch.randn(3, 5, 8), torch.randn(8)]
    )
    x = torch.randn(4, 8)
    root = torch_npu.npu_rms_norm(x.to("npu"), torch.ones(8, device="npu"), epsilon=1e-3)[1]
    torch.testing.assert_close(root.cpu(), 1 / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt())


def test_rms_norm_keeps_the_type_and_computes_in_float32():
    x = (torch.randn(4, 64) * 100).bfloat16()
    got, root = torch_npu.npu_rms_norm(x.to("npu"), torch.ones(64, device="npu", dtype=torch.bfloat16))
    assert got.dtype == torch.bfloat16 and root.dtype == torch.float32
    torch.testing.assert_close(got.cpu().double(), rms(x.double(), torch.ones(64).double()), rtol=8e-3, atol=0)


def test_operators_infer_shapes_of_fake_tensors():
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.empty(2, 8, dtype=torch.bfloat16, device="npu"))
        result = torch_npu.npu_swiglu(x)
    assert isinstance(result, FakeTensor)
    assert (result.shape, result.dtype, result.device.type) == ((2, 4), torch.bfloat16, "npu")


def test_wrong_epsilon_detected():
    with pytest.raises(AssertionError):
        assert_like_reference(
            lambda x, g: torch_npu.npu_rms_norm(x, g, 1e-2)[0], rms, [torch.randn(3, 8) * 0.1, torch.randn(8)]
        )


def test_add_rms_norm_returns_the_sum_too():
    """It is for inference: torch_npu has no gradient of it."""
    one, other, gamma = torch.randn(3, 8), torch.randn(3, 8), torch.randn(8)
    normal, _, total = torch_npu.npu_add_rms_norm(one.to("npu"), other.to("npu"), gamma.to("npu"))
    torch.testing.assert_close(normal.cpu(), rms(one + other, gamma))
    torch.testing.assert_close(total.cpu(), one + other)


@pytest.mark.parametrize("shape", [(6,), (5, 6)])
def test_layer_norm_for_inference(shape):
    x, weight, bias = torch.randn(4, 5, 6), torch.randn(shape), torch.randn(shape)
    found = torch_npu.npu_layer_norm_eval(x.to("npu"), shape, weight.to("npu"), bias.to("npu"), 1e-3)
    torch.testing.assert_close(found.cpu(), functional.layer_norm(x, shape, weight, bias, 1e-3))
    plain = torch_npu.npu_layer_norm_eval(x.half().to("npu"), shape)
    torch.testing.assert_close(plain.cpu(), functional.layer_norm(x.half().float(), shape).half())


@pytest.mark.parametrize("dim", [-1, 0])
def test_swiglu_and_its_gradient(dim):
    def reference(x):
        gate, up = x.chunk(2, dim)
        return gate * torch.sigmoid(gate) * up

    assert_like_reference(lambda x: torch_npu.npu_swiglu(x, dim), reference, [torch.randn(4, 6)])


@pytest.mark.parametrize("dim", [-1, 0])
def test_the_gradient_of_swiglu_as_an_operator(dim):
    x, gradient = torch.randn(4, 6), torch.randn(2, 6) if dim == 0 else torch.randn(4, 3)
    leaf = x.double().requires_grad_()
    gate, up = leaf.chunk(2, dim)
    (functional.silu(gate) * up * gradient.double()).sum().backward()
    got = torch_npu.npu_swiglu_backward(gradient.to("npu"), x.to("npu"), dim)
    torch.testing.assert_close(got.cpu().double(), leaf.grad, rtol=1e-5, atol=1e-5)
    wide = torch_npu.npu_swiglu_backward(gradient.bfloat16().to("npu"), x.bfloat16().to("npu"), dim)
    assert wide.dtype == torch.bfloat16


def test_fast_gelu():
    x = torch.randn(9)
    torch.testing.assert_close(torch_npu.npu_fast_gelu(x.to("npu")).cpu(), x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize("is_fixed", [True, False])
def test_scaled_masked_softmax(is_fixed):
    mask = torch.ones(5, 5, dtype=torch.bool).triu(1)
    given = torch.zeros(1, 1, 5, 5, dtype=torch.bool) if is_fixed else mask
    assert_like_reference(
        lambda x: torch_npu.npu_scaled_masked_softmax(x, given.to("npu"), 0.5, is_fixed),
        lambda x: (x * 0.5).masked_fill(mask, -10000.0).softmax(-1),
        [torch.randn(2, 3, 5, 5)],
    )


def rotated_pairwise(x, angles, pairs):
    """Rotation written number by number: pair (i, j) turns by its angle."""
    out = x.clone()
    for number, (i, j) in enumerate(pairs):
        cos, sin = angles[..., number].cos(), angles[..., number].sin()
        out[..., i] = x[..., i] * cos - x[..., j] * sin
        out[..., j] = x[..., j] * cos + x[..., i] * sin
    return out


@pytest.mark.parametrize("mode", ["half", "interleave"])
def test_rotary_mul_turns_pairs(mode):
    angles = torch.randn(4, 1, 3, dtype=torch.float64)
    table = torch.cat([angles, angles], -1) if mode == "half" else angles.repeat_interleave(2, -1)
    pairs = [(i, i + 3) for i in range(3)] if mode == "half" else [(2 * i, 2 * i + 1) for i in range(3)]
    cos, sin = table.cos().float(), table.sin().float()
    assert_like_reference(
        lambda x: torch_npu.npu_rotary_mul(x, cos.to("npu"), sin.to("npu"), mode),
        lambda x: rotated_pairwise(x, angles, pairs),
        [torch.randn(4, 2, 6)],
    )


@pytest.mark.parametrize("half", [True, False])
def test_rotary_embedding_from_a_table_writes_in_place(half):
    positions, head_size = torch.tensor([3, 0, 5]), 6
    angles = torch.randn(10, head_size // 2, dtype=torch.float64)
    query, key = torch.randn(3, 2 * head_size), torch.randn(3, head_size)
    pairs = [(i, i + 3) for i in range(3)] if half else [(2 * i, 2 * i + 1) for i in range(3)]
    table = torch.cat([angles.cos(), angles.sin()], -1).float().to("npu")
    on_npu = [query.to("npu"), key.to("npu")]
    torch_npu._npu_rotary_embedding(positions.to("npu"), *on_npu, head_size, table, half)
    for before, after in zip((query, key), on_npu, strict=True):
        heads = before.double().view(3, -1, head_size)
        expected = rotated_pairwise(heads, angles[positions].unsqueeze(1), pairs).view_as(before)
        torch.testing.assert_close(after.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_interleave_rope_is_rotation_of_pairs_moved_apart():
    angles, x = torch.randn(2, 1, 1, 4, dtype=torch.float64), torch.randn(2, 3, 1, 8)
    table = torch.cat([angles, angles], -1)
    got = torch_npu.npu_interleave_rope(x.to("npu"), table.cos().float().to("npu"), table.sin().float().to("npu"))
    turned = rotated_pairwise(x.double(), angles, [(2 * i, 2 * i + 1) for i in range(4)])
    expected = torch.cat([turned[..., ::2], turned[..., 1::2]], -1)
    torch.testing.assert_close(got.cpu().double(), expected, rtol=1e-5, atol=1e-5)


def test_adam_step_equals_torch():
    parameter = torch.randn(5).requires_grad_()
    optimizer = torch.optim.AdamW([parameter], lr=0.1, betas=(0.9, 0.99), eps=1e-6, weight_decay=0.2)
    on_npu = [parameter.detach().to("npu"), torch.zeros(5, device="npu"), torch.zeros(5, device="npu")]
    for step in range(4):
        parameter.grad = torch.randn(5)
        powers = (0.9**step, 0.99**step)
        torch_npu.npu_apply_adam_w(
            *powers, 0.1, 0.2, 0.9, 0.99, 1e-6, parameter.grad.to("npu"), None, False, False, out=on_npu
        )
        optimizer.step()
        torch.testing.assert_close(on_npu[0].cpu(), parameter.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.2])
def test_torchs_fused_adamw_on_the_device_is_that_of_the_host(amsgrad, maximize, decay):
    """Gradients become smaller, so that the largest average is not the present one."""
    options = {"lr": 0.1, "betas": (0.9, 0.6), "eps": 1e-6, "weight_decay": decay, "maximize": maximize}
    host = torch.randn(5)
    device = host.to("npu").requires_grad_()
    host.requires_grad_()
    ours = torch.optim.AdamW([device], fused=True, amsgrad=amsgrad, **options)
    torchs = torch.optim.AdamW([host], foreach=False, amsgrad=amsgrad, **options)
    for step in range(4):
        host.grad = torch.randn(5) / 4**step
        device.grad = host.grad.to("npu")
        ours.step()
        torchs.step()
        torch.testing.assert_close(device.detach().cpu(), host.detach(), rtol=1e-5, atol=1e-6)


def test_top_k_top_p_keeps_the_smallest_sufficient_set():
    logits, k, p = torch.randn(6, 20), torch.tensor([1, 3, 20, 5, 20, 2]), torch.tensor([1.0, 0.5, 0.7, 0.9, 1.0, 0.1])
    got = torch_npu.npu_top_k_top_p(logits.to("npu"), p.to("npu"), k.to("npu")).cpu()
    for row in range(6):
        order = logits[row].argsort(descending=True).tolist()[: int(k[row])]
        mass, kept = 0.0, []
        weights = logits[row][order].double().softmax(0)
        for index, weight in zip(order, weights.tolist(), strict=True):
            if kept and mass >= p[row] - 1e-9:
                break
            kept.append(index)
            mass += weight
        assert got[row].isfinite().nonzero().flatten().tolist() == sorted(kept)


@pytest.mark.parametrize("of_input", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("of_weights", [torch.float32, torch.float16, torch.bfloat16])
def test_layer_norm_of_mixed_types_rounds_once(of_input, of_weights):
    given = [torch.randn(4, 8).to(of_input), torch.rand(8).to(of_weights), torch.randn(8).to(of_weights)]
    ours = [each.to("npu").requires_grad_() for each in given]
    theirs = [each.double().requires_grad_() for each in given]
    found, expected = (functional.layer_norm(x, (8,), weight, bias) for x, weight, bias in (ours, theirs))
    gradient = torch.randn(4, 8).to(found.dtype)
    found.backward(gradient.to("npu"))
    expected.backward(gradient.double())
    pairs = [(found, expected), *((one.grad, other.grad) for one, other in zip(ours, theirs, strict=True))]
    for one, other in pairs:
        torch.testing.assert_close(one.detach().cpu(), other.detach().to(one.dtype), rtol=8e-3, atol=1e-3)
