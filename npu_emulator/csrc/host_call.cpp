#include "host_call.h"

#include <ATen/record_function.h>
#include <torch/csrc/autograd/python_variable.h>

#include "device.h"
#include "host_alias.h"
#include "memory.h"
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

}  // namespace

py::object call_on_host(const py::str& name, const py::function& function, const py::tuple& args,
                        const py::dict& kwargs) {
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
    results = function(*host_args, **host_kwargs);
  }
  return call.to_device(results);
}

}  // namespace npu
