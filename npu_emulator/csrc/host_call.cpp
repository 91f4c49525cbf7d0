#include "host_call.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "device.h"
#include "graph.h"
#include "host_alias.h"
#include "memory.h"
#include "meters.h"
#include "recorder.h"

namespace npu {
namespace {

namespace py = pybind11;

bool is_sequence_of_tensors(py::handle value) {
  if (!PyList_Check(value.ptr()) && !PyTuple_Check(value.ptr())) return false;
  return PySequence_Fast_GET_SIZE(value.ptr()) && THPVariable_Check(PySequence_Fast_GET_ITEM(value.ptr(), 0));
}

class HostCall {
 public:
  py::object to_host(py::handle value) {
    if (THPVariable_Check(value.ptr())) return tensor_to_host(value);
    if (!is_sequence_of_tensors(value)) return py::reinterpret_borrow<py::object>(value);
    py::list host;
    for (const auto item : py::reinterpret_borrow<py::sequence>(value)) host.append(to_host(item));
    return host;
  }

  py::object to_device(py::handle value) {
    if (THPVariable_Check(value.ptr()))
      return py::reinterpret_steal<py::object>(
          THPVariable_Wrap(aliases_.to_device(THPVariable_Unpack(value.ptr()), device())));
    if (PyTuple_Check(value.ptr())) {
      py::tuple results(PyTuple_GET_SIZE(value.ptr()));
      for (size_t index = 0; index < results.size(); ++index)
        results[index] = to_device(PyTuple_GET_ITEM(value.ptr(), index));
      return results;
    }
    if (!PyList_Check(value.ptr())) return py::reinterpret_borrow<py::object>(value);
    py::list results;
    for (const auto item : py::reinterpret_borrow<py::list>(value)) results.append(to_device(item));
    return results;
  }

  c10::DeviceIndex device() const { return device_ < 0 ? current_device() : device_; }

 private:
  py::object tensor_to_host(py::handle value) {
    const auto& tensor = THPVariable_Unpack(value.ptr());
    if (!tensor.is_privateuseone()) return py::reinterpret_borrow<py::object>(value);
    if (device_ < 0) device_ = tensor.device().index();
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(aliases_.alias(tensor)));
  }

  HostAliases aliases_;
  c10::DeviceIndex device_ = -1;
};

// While an operator computes on the host: torch.autocast("cpu") is about the program's own host tensors, not about these.
using WithoutAutocast = c10::impl::ExcludeDispatchKeyGuard;

// The tensors of a Python value, also in lists and tuples, in order.
void collect(py::handle value, std::vector<at::Tensor>& tensors) {
  if (THPVariable_Check(value.ptr())) {
    tensors.push_back(THPVariable_Unpack(value.ptr()));
  } else if (PyList_Check(value.ptr()) || PyTuple_Check(value.ptr())) {
    for (const auto item : py::reinterpret_borrow<py::sequence>(value)) collect(item, tensors);
  }
}

py::object operand(GraphCall& call, py::handle value) {
  if (THPVariable_Check(value.ptr()))
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(call.operand(THPVariable_Unpack(value.ptr()))));
  if (!is_sequence_of_tensors(value)) return py::reinterpret_borrow<py::object>(value);
  py::list list;
  for (const auto item : py::reinterpret_borrow<py::sequence>(value)) list.append(operand(call, item));
  return list;
}

// A Python function and its arguments, which a graph calls again. They are released with the interpreter's lock.
struct PythonCall {
  py::function function;
  py::tuple args;
  py::dict kwargs;

  static std::shared_ptr<PythonCall> make(const py::function& function, py::tuple args, py::dict kwargs) {
    return {new PythonCall{function, std::move(args), std::move(kwargs)}, [](PythonCall* call) {
              if (!Py_IsInitialized()) return;
              const py::gil_scoped_acquire interpreter;
              delete call;
            }};
  }

  std::vector<at::Tensor> operator()() const {
    const py::gil_scoped_acquire interpreter;
    const at::NoGradGuard no_gradients;
    const WithoutAutocast without_autocast(c10::autocast_dispatch_keyset);
    std::vector<at::Tensor> results;
    collect(function(*args, **kwargs), results);
    return results;
  }
};

// Records what has just been computed. `results` are on the die.
void record(const std::string& name, const py::function& function, const py::tuple& args, const py::dict& kwargs,
            const py::object& results, c10::DeviceIndex device, bool writes) {
  GraphCall call(name);
  std::vector<at::Tensor> taken, made;
  collect(args, taken);
  for (const auto& [key, value] : kwargs) collect(value, taken);
  collect(results, made);
  bool makes = writes;
  for (auto& each : made) {
    bool is_view = !each.defined() || !each.is_privateuseone();
    for (const auto& input : taken)
      is_view = is_view || (input.defined() && input.has_storage() && input.is_alias_of(each));
    makes = makes || !is_view;
    each = is_view ? at::Tensor() : call.result(each);
  }
  if (!makes) return;
  py::tuple operands(args.size());
  for (size_t index = 0; index < args.size(); ++index) operands[index] = operand(call, args[index]);
  py::dict named;
  for (const auto& [key, value] : kwargs) named[key] = operand(call, value);
  call.done([name, device, made, python = PythonCall::make(function, operands, named)] {
    ++meters::operator_calls(name);
    std::vector<at::Tensor> again;
    {
      const recorder::Computing computing(name, device);
      again = (*python)();
    }
    graph::write_results(made, again, name);
  });
}

}  // namespace

void will_write(const py::sequence& tensors) {
  GraphCall call("");
  for (const auto tensor : tensors) call.writes(THPVariable_Unpack(tensor.ptr()));
}

py::object call_on_host(const py::str& name, const py::function& function, const py::tuple& args,
                        const py::dict& kwargs, bool writes) {
  at::RecordFunction call_of_operator(at::RecordScope::FUNCTION);
  if (call_of_operator.isActive()) call_of_operator.before(static_cast<std::string>(name));
  HostCall call;
  py::tuple host_args(args.size());
  for (size_t index = 0; index < args.size(); ++index)
    host_args[index] = call.to_host(PyTuple_GET_ITEM(args.ptr(), index));
  py::dict host_kwargs;
  for (const auto& [name, value] : kwargs) host_kwargs[name] = call.to_host(value);
  py::object results;
  {
    const ChargeScope scope(call.device());
    const recorder::Computing computing(name, call.device());
    const WithoutAutocast without_autocast(c10::autocast_dispatch_keyset);
    results = function(*host_args, **host_kwargs);
  }
  auto on_device = call.to_device(results);
  if (graph::recording()) record(name, function, args, kwargs, on_device, call.device(), writes);
  return on_device;
}

}  // namespace npu
