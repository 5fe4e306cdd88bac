// PyTorch's tensors and threads through tables of C functions.
#include "python/torch_host.h"

#include <nanobind/stl/vector.h>  // IWYU pragma: keep

#include <algorithm>
#include <memory>

#include "heed/core/error.h"
#include "python/dlpack.h"
#include "python/runtime.h"

namespace heed::python {
namespace {

using namespace nanobind::literals;

// The C functions of libtorch_cpu's stable interface; both return 0 on success.
using Body = void (*)(int64_t begin, int64_t end, void* argument);
using ParallelFor = int32_t (*)(int64_t begin, int64_t end, int64_t grain, Body body, void* argument);
using NumThreadsOf = int32_t (*)(uint32_t* num_threads);

// The arguments of _connect_torch. They live as long as the process, as torch does.
struct Torch {
  PyTypeObject* tensor = nullptr;
  const DLPackExchangeAPI* dlpack = nullptr;
  ParallelFor parallel_for = nullptr;
  NumThreadsOf num_threads = nullptr;
  bool forked = false;
} torch;

int NumTorchThreads() {
  uint32_t num_threads = 1;
  if (torch.num_threads(&num_threads) != 0) return 1;
  return static_cast<int>(std::clamp<uint32_t>(num_threads, 1, kMaxThreads));
}

void RunOnTorch(void*, int num_workers, void (*body)(void*, int), void* argument) {
  struct Job {
    void (*body)(void*, int);
    void* argument;
  } job = {body, argument};
  const auto run = [](int64_t begin, int64_t end, void* of) {
    const Job& j = *static_cast<Job*>(of);
    for (int64_t worker = begin; worker < end; ++worker) {
      j.body(j.argument, static_cast<int>(worker));
    }
  };
  // If the pool refuses, the remaining work is done here.
  if (torch.parallel_for(0, num_workers, 1, run, &job) != 0) body(argument, 0);
}

// torch.cuda.current_stream(device).cuda_stream, without calling Python code; needs the GIL.
void* CurrentStream(Device device) {
  if (device.type == DeviceType::kCpu) return nullptr;
  if (torch.dlpack->current_work_stream == nullptr)
    throw Unsupported("heed.torch: this PyTorch does not tell its streams");
  void* stream = nullptr;
  if (torch.dlpack->current_work_stream(static_cast<int32_t>(device.type), device.index, &stream) != 0) {
    throw nb::python_error();
  }
  return stream;
}

void ConnectTorch(nb::handle tensor, uintptr_t parallel_for, uintptr_t num_threads) {
  const nb::object capsule = nb::getattr(tensor, "__dlpack_c_exchange_api__", nb::none());
  const auto* dlpack = static_cast<const DLPackExchangeAPI*>(
      capsule.is_none() ? nullptr : PyCapsule_GetPointer(capsule.ptr(), "dlpack_exchange_api"));
  if (dlpack == nullptr || dlpack->version.major != 1 || dlpack->dltensor_from_py_object_no_sync == nullptr ||
      parallel_for == 0 || num_threads == 0) {
    PyErr_Clear();
    throw Unsupported(
        "heed.torch: this PyTorch lacks DLPack's exchange table or its stable C "
        "functions for threads, expected version 2.10 or newer");
  }
  torch.dlpack = dlpack;
  torch.parallel_for = reinterpret_cast<ParallelFor>(parallel_for);
  torch.num_threads = reinterpret_cast<NumThreadsOf>(num_threads);
  torch.tensor = reinterpret_cast<PyTypeObject*>(nb::borrow(tensor).release().ptr());
}

}  // namespace

bool ImportTorch(const Argument& argument, ArrayLayout& layout, bool devices) {
  PyObject* const value = argument.value.ptr();
  if (torch.tensor == nullptr || !PyObject_TypeCheck(value, torch.tensor)) return false;
  DLTensor tensor;
  if (torch.dlpack->dltensor_from_py_object_no_sync(value, &tensor) != 0) {
    throw nb::python_error();
  }
  ReadDlTensor(argument, tensor, devices, layout);
  return true;
}

Context& TorchContext(int most_threads, Device device) {
  thread_local std::unique_ptr<Context> context;
  thread_local bool of_child = false;
  int num_threads = NumTorchThreads();
  if (most_threads != 0) num_threads = std::min(num_threads, most_threads);
  if (context == nullptr || context->num_threads() != num_threads || of_child != torch.forked) {
    context.reset();  // its scratch memory first
    of_child = torch.forked;
    if (torch.forked) {
      context = std::make_unique<Context>(num_threads);
    } else {
      const auto threads_of = [](void* self) { return static_cast<int>(reinterpret_cast<intptr_t>(self)); };
      void* const self = reinterpret_cast<void*>(intptr_t{num_threads});
      context = std::make_unique<Context>(Executor{self, threads_of, &RunOnTorch});
    }
  }
  context->set_strict(Strict());
  context->set_checks(Checks());
  context->set_stream(CurrentStream(device));
  return *context;
}

void BindTorchHost(nb::module_& m) {
  m.def("_connect_torch", &ConnectTorch, "tensor"_a, "parallel_for"_a, "num_threads"_a);
  m.def("_after_fork", [] { torch.forked = true; });
  m.def("_foreign_keyword", &ForeignKeyword, "name"_a, "keywords"_a);
}

}  // namespace heed::python
