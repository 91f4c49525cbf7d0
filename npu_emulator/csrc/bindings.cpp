// The Python face of the emulated device: npu_emulator._C.
#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "allocator_options.h"
#include "device.h"
#include "fallback.h"
#include "generator.h"
#include "graph.h"
#include "hccl.h"
#include "hooks.h"
#include "host_alias.h"
#include "host_call.h"
#include "memory.h"
#include "memory_pool.h"
#include "meters.h"
#include "node.h"
#include "pinned_memory.h"
#include "recorder.h"

namespace py = pybind11;

namespace {

py::dict memory_statistics(c10::DeviceIndex device) {
  const auto now = npu::memory_statistics(device);
  using namespace pybind11::literals;
  return py::dict("capacity"_a = now.capacity, "limit"_a = now.limit, "allocated"_a = now.allocated,
                  "reserved"_a = now.reserved, "kept"_a = now.kept, "absent"_a = now.absent,
                  "peak_allocated"_a = now.peak_allocated, "peak_reserved"_a = now.peak_reserved,
                  "watermark"_a = now.watermark, "allocations"_a = now.allocations, "frees"_a = now.frees,
                  "out_of_memory_errors"_a = now.out_of_memory_errors);
}

// (count, bytes) of copies from host to device, device to host and device to device.
std::vector<std::pair<int64_t, int64_t>> copies() {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (const auto& each : npu::meters::all_copies()) all.emplace_back(each.count, each.bytes);
  return all;
}

// (kind, group size, count, bytes)
std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>> collectives() {
  std::vector<std::tuple<std::string, int64_t, int64_t, int64_t>> all;
  for (const auto& [key, totals] : npu::meters::all_collectives())
    all.emplace_back(std::get<0>(key), std::get<1>(key), totals.count, totals.bytes);
  return all;
}

// (process, bytes) of each living process that holds memory of a die.
std::vector<std::pair<int64_t, int64_t>> holders(c10::DeviceIndex device) {
  std::vector<std::pair<int64_t, int64_t>> all;
  for (const auto& each : npu::node::holders(npu::die_of_machine(npu::resolve_device(device))))
    all.emplace_back(each.process, each.bytes);
  return all;
}

void bind_device(py::module& module) {
  module.def("device_count", &npu::device_count);
  module.def("current_device", &npu::current_device);
  module.def("set_device", [](c10::DeviceIndex index) {
    npu::initialize();
    npu::set_device(index);
  });
  module.def("initialize", &npu::initialize);
  module.def("is_initialized", &npu::is_initialized);
  module.def("is_in_bad_fork", &npu::is_in_bad_fork);
  module.def("default_generator", &npu::default_generator);
  module.def("is_pinned", [](const at::Tensor& tensor) {
    return tensor.is_cpu() && tensor.layout() == at::kStrided && npu::is_pinned(tensor.storage().data());
  });
}

void bind_memory(py::module& module) {
  module.def("memory_statistics", &memory_statistics);
  module.def("set_capacity", &npu::set_capacity);
  module.def("set_limit", &npu::set_limit);
  module.def("check_allocator_options", &npu::check_allocator_options);
  module.def("free_bytes", &npu::free_bytes);
  module.def("holders", &holders);
  module.def("leave_node", &npu::node::leave);
  module.def("reset_peak_statistics", &npu::reset_peak_statistics);
  module.def("exchange_watermark", &npu::exchange_watermark);
  module.def("empty_cache", &npu::empty_cache);
}

// `made` gets (device, bytes, address, handle) of every region of the pool, as vllm-ascend's allocator hands it to
// Python, and `gone` the address when its tensor is.
void set_pool_owner(py::function made, py::function gone) {
  // Never released: tensors may go when the interpreter has.
  auto* when_made = new py::function(std::move(made));
  auto* when_gone = new py::function(std::move(gone));
  npu::pool::Owner owner;
  owner.made = [when_made](uintptr_t address, const npu::pool::Region& region) {
    const py::gil_scoped_acquire interpreter;
    (*when_made)(py::make_tuple(region.device, region.bytes, address, address));
  };
  owner.gone = [when_gone](uintptr_t address) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire interpreter;
    try {
      (*when_gone)(address);
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("the owner of a memory pool");
    }
  };
  npu::pool::set_owner(std::move(owner));
}

void bind_memory_pool(py::module& module) {
  module.def("set_pool_owner", &set_pool_owner);
  module.def("pool_is_active", &npu::pool::is_active);
  module.def("set_pool_active", &npu::pool::set_active);
  module.def("take_pool_memory_away", &npu::pool::take_away);
  module.def("put_pool_memory_back", &npu::pool::put_back);
}

void bind_operators(py::module& module) {
  module.def("call_on_host", &npu::call_on_host, py::arg("name"), py::arg("function"), py::arg("args") = py::tuple(),
             py::arg("kwargs") = py::dict(), py::arg("writes") = false);
  module.def("will_write", &npu::will_write);
  module.def("host_alias", &npu::host_alias);
  module.def("count_operator", [](const std::string& name) { ++npu::meters::operator_calls(name); });
  module.def("operator_calls", &npu::meters::all_operator_calls);
  module.def("copies", &copies);
  module.def("collectives", &collectives);
}

// A tensor over the memory of another that does not keep it alive, where a private pool does; else one that does.
at::Tensor weak_alias(const at::Tensor& tensor) {
  const auto& storage = tensor.storage();
  if (!npu::private_pool_of(storage.data_ptr())) return tensor.view_as(tensor);
  c10::Storage weak(c10::Storage::use_byte_size_t(), storage.nbytes(), npu::without_owner(storage.data_ptr()),
                    npu::device_allocator(), /*resizable=*/true);
  auto alias = at::empty({0}, tensor.options());
  return alias.set_(weak, tensor.storage_offset(), tensor.sizes(), tensor.strides());
}

void bind_graphs(py::module& module) {
  py::class_<npu::Graph>(module, "Graph")
      .def(py::init<>())
      .def("begin_capture", &npu::Graph::begin_capture)
      .def("end_capture", &npu::Graph::end_capture)
      .def("replay", &npu::Graph::replay, py::call_guard<py::gil_scoped_release>())
      .def("reset", &npu::Graph::reset)
      .def("pool", &npu::Graph::pool)
      .def_property_readonly("size", &npu::Graph::size);
  module.def("new_graph_pool", [] { return npu::PrivatePool::new_name(true); });
  module.def("is_recording", &npu::graph::recording);
  module.def("refuse_in_graph", &npu::graph::refuse);
  module.def("set_bystander", &npu::graph::set_bystander);
  module.def("weak_alias", &weak_alias);
  module.def("graphs", [] {
    const auto now = npu::meters::all_graphs();
    return std::make_tuple(now.captured, now.replayed, now.tasks);
  });
}

void bind_recorder(py::module& module) {
  py::enum_<npu::recorder::Kind>(module, "EventKind")
      .value("OPERATOR", npu::recorder::Kind::kOperator)
      .value("BACKWARD", npu::recorder::Kind::kBackward)
      .value("ANNOTATION", npu::recorder::Kind::kAnnotation)
      .value("KERNEL", npu::recorder::Kind::kKernel)
      .value("COLLECTIVE", npu::recorder::Kind::kCollective);
  py::class_<npu::recorder::Event>(module, "Event")
      .def_readonly("kind", &npu::recorder::Event::kind)
      .def_readonly("name", &npu::recorder::Event::name)
      .def_readonly("start", &npu::recorder::Event::start)
      .def_readonly("duration", &npu::recorder::Event::duration)
      .def_readonly("thread", &npu::recorder::Event::thread)
      .def_readonly("device", &npu::recorder::Event::device)
      .def_readonly("shapes", &npu::recorder::Event::shapes);
  module.def("start_recording", &npu::recorder::start);
  module.def("stop_recording", &npu::recorder::stop);
}

void bind_hccl(py::module& module) {
  module.def("set_deferred_collectives", &npu::set_deferred_collectives);
  module.def("deferred_collectives", &npu::deferred_collectives);
  module.def("complete_deferred_collectives", &npu::complete_deferred_collectives,
             py::call_guard<py::gil_scoped_release>());
  py::class_<npu::HcclBackend, c10::intrusive_ptr<npu::HcclBackend>, c10d::Backend>(module, "HcclBackend")
      .def(py::init<c10::intrusive_ptr<c10d::Backend>, c10::intrusive_ptr<c10d::Store>, int, int>(),
           py::arg("carrier"), py::arg("store"), py::arg("rank"), py::arg("size"))
      .def(
          "get_hccl_comm_name",
          [](npu::HcclBackend& backend, int, bool) { return "emulated_hccl_" + backend.getGroupUid(); },
          py::arg("rank"), py::arg("init_comm") = true);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  npu::register_hooks();
  npu::route_inherited_operators();
  bind_device(module);
  bind_memory(module);
  bind_memory_pool(module);
  bind_operators(module);
  bind_graphs(module);
  bind_recorder(module);
  bind_hccl(module);
}
