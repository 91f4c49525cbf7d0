// Runs a Python function on host aliases of NPU tensors.
#pragma once
#include <pybind11/pybind11.h>

namespace npu {

// `function(*args, **kwargs)` with every NPU tensor, also in lists and tuples, replaced by its host alias. What it
// allocates is charged to the die of the first one, or the current die, and the tensors that it returns go there.
// A profiler knows the call by `name`. `writes` says whether it writes to arguments; which, `will_write` is told first
// while a graph is captured.
pybind11::object call_on_host(const pybind11::str& name, const pybind11::function& function,
                              const pybind11::tuple& args, const pybind11::dict& kwargs, bool writes);
void will_write(const pybind11::sequence& tensors);

}  // namespace npu
