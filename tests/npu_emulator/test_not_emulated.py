"""What is not emulated says so; it never passes for done."""

import pytest
import torch_npu


def test_the_profiler_says_that_it_writes_no_trace():
    with pytest.warns(RuntimeWarning, match="no trace will be written"), torch_npu.profiler.profile():
        pass


def test_counting_floating_point_operations_is_refused():
    with pytest.raises(NotImplementedError, match="FlopsCounter"):
        torch_npu.utils.FlopsCounter().start()


def test_an_operator_that_is_not_emulated_is_refused_by_name():
    with pytest.raises(NotImplementedError, match="npu_no_such_operator"):
        torch_npu.npu_no_such_operator()
