// PyTorch without compiling against it: its tensors through DLPack's table of C functions, its threads through two C
// functions of libtorch_cpu.
#ifndef HEED_PYTHON_TORCH_HOST_H_
#define HEED_PYTHON_TORCH_HOST_H_

#include <nanobind/nanobind.h>

#include "heed/core/context.h"
#include "python/arguments.h"
#include "python/array_import.h"

namespace heed::python {

// Fills `layout` if `argument` is a torch.Tensor and torch is connected, else returns false. A tensor on a CUDA device
// is accepted if `devices`. Its memory is valid while the caller holds the tensor. No capsule is made: this takes some
// 50 nanoseconds instead of two microseconds by __dlpack__.
bool ImportTorch(const Argument& argument, ArrayLayout& layout, bool devices = false);

// The calling thread's Context on PyTorch's pool, with as many threads as PyTorch uses, or at most `most_threads` if
// that is not 0. In a forked child, where an OpenMP pool would wait for threads that no longer exist, it is on heed's
// own pool. Calls on views of `device`, if that is a GPU, use PyTorch's current stream of it.
Context& TorchContext(int most_threads, Device device = {});

// Binds the functions that the package heed.torch calls once.
void BindTorchHost(nb::module_& m);

}  // namespace heed::python

#endif  // HEED_PYTHON_TORCH_HOST_H_
