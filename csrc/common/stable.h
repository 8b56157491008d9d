// All torch headers that this library includes, the names it uses from them, and what older ones lack. It
// uses only the LibTorch stable ABI (torch/csrc/stable, torch/headeronly): no ATen, no pybind. Sources
// compile against the headers of torch 2.11 and later (`make matrix`).
#pragma once

#ifdef USE_CUDA
#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#endif

#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/macros.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

// A call of the torch C interface that must succeed. The headers of 2.13 introduced the macro that also gives
// the reason.
#ifdef STABLE_TORCH_ERROR_CODE_CHECK
#define NWOR_TORCH_CHECK STABLE_TORCH_ERROR_CODE_CHECK
#else
#define NWOR_TORCH_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace nwor {

using Library = torch::stable::detail::StableLibrary;
using torch::headeronly::BFloat16;
using torch::headeronly::Half;
using torch::headeronly::ScalarType;
using torch::stable::new_empty;
using torch::stable::parallel_for;
using torch::stable::Tensor;
#ifdef USE_CUDA
using torch::stable::accelerator::DeviceGuard;
#endif

}  // namespace nwor
