import pytest
import torch
import torch_npu  # noqa: F401

from post_training.finite_steps.weights import NonfiniteWeightsError, check_weights, nonfinite_weights


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(4))
        self.register_buffer("scratch", torch.full((4,), float("nan")), persistent=False)


def model():
    return torch.nn.ModuleDict({"router": Router(), "o_proj": torch.nn.Linear(8, 8, dtype=torch.bfloat16)}).npu()


def test_finite_weights_pass_whatever_is_in_memory_that_is_not_saved(lone_rank):
    check_weights([model()], "weights", "remedy")
    check_weights([], "weights", "remedy")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["o_proj.weight", "o_proj.bias", "router.expert_bias"])
def test_one_bad_value_is_named_with_its_rank(lone_rank, bad, where):
    chunk = model()
    with torch.no_grad():
        chunk.state_dict()[where].view(-1)[-1] = bad
    assert nonfinite_weights([torch.nn.Identity(), chunk]) == [where]
    with pytest.raises(NonfiniteWeightsError, match=rf"^weights contain inf or nan in {where} \(rank 0\); remedy$"):
        check_weights([chunk], "weights", "remedy")


def test_many_are_counted(lone_rank):
    chunks = [torch.nn.Linear(2, 2).npu() for _ in range(3)]
    for parameter in (each for chunk in chunks for each in chunk.parameters()):
        parameter.data.fill_(float("nan"))
    with pytest.raises(NonfiniteWeightsError, match="and 3 more; remedy"):
        check_weights(chunks, "weights", "remedy")
