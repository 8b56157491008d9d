// What all CUDA kernels share: the shape of a launch, decided here and nowhere else, the stream it goes
// to, and the device-side record of a bad index that debug mode turns into an exception.
#pragma once

#include <cuda_runtime.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "../check.h"

namespace nwor {

// ---------------------------------------------------------------- the shape of a launch

constexpr int kThreads = 256;  // of a block, at most
constexpr int kWarp = 32;
constexpr int64_t kMostGridY = 65535;
// Two blocks for each multiprocessor of an H200. With fewer rows than this, a block takes as few rows as
// a full warp allows, so that the rows spread over the chip.
constexpr int64_t kEnoughBlocks = 264;

struct LaunchShape {
    dim3 grid, block;
};

inline int64_t ceil_div(int64_t n, int64_t d) {
    return (n + d - 1) / d;
}

// Rows of `units` accesses each. threadIdx.x and blockIdx.y walk along a row, threadIdx.y and blockIdx.x
// over the rows; blockIdx.z is left to the kernel (planes or layers).
inline LaunchShape shape_for_rows(int64_t rows, int64_t units, int64_t units_per_thread, int64_t slices) {
    const int64_t wanted = std::max<int64_t>(ceil_div(units, units_per_thread), 1);
    int64_t x = 1;
    while (x < wanted && x < kWarp) x *= 2;
    if (wanted > kWarp) x = std::min<int64_t>(ceil_div(wanted, kWarp) * kWarp, kThreads);
    int64_t y = kThreads / x;
    while (y > 1 && x * y > kWarp && rows < y * kEnoughBlocks) y = (y + 1) / 2;
    const int64_t along = std::min(ceil_div(wanted, x), kMostGridY);
    return {dim3(static_cast<unsigned>(ceil_div(rows, y)), static_cast<unsigned>(along),
                 static_cast<unsigned>(slices)),
            dim3(static_cast<unsigned>(x), static_cast<unsigned>(y))};
}

// One thread for each of `items`, and at least one block.
inline LaunchShape shape_for_items(int64_t items) {
    return {dim3(static_cast<unsigned>(std::max<int64_t>(ceil_div(items, kThreads), 1))), dim3(kThreads)};
}

__device__ inline int64_t row_of_thread() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.y + threadIdx.y;
}

// The device of the arguments, made current, and torch's stream there.
class Launch {
  public:
    explicit Launch(const Tensor& tensor) : guard_(tensor.get_device_index()) {
        void* stream = nullptr;
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(tensor.get_device_index(), &stream));
        stream_ = static_cast<cudaStream_t>(stream);
    }
    cudaStream_t stream() const { return stream_; }

  private:
    torch::stable::accelerator::DeviceGuard guard_;
    cudaStream_t stream_;
};

// ---------------------------------------------------------------- division without a divide

// n / divisor for 0 <= n < 2^31 by a multiplication and a shift (Granlund and Montgomery, 1994): an integer
// division costs a GPU some twenty instructions.
struct FastDivisor {
    uint32_t divisor, magic, shift;

    FastDivisor() = default;
    explicit FastDivisor(int64_t d) : divisor(static_cast<uint32_t>(std::max<int64_t>(d, 1))), shift(0) {
        while ((uint64_t{1} << shift) < divisor) ++shift;
        magic = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - divisor) / divisor + 1);
    }
    __device__ uint32_t quotient(uint32_t n) const { return (__umulhi(n, magic) + n) >> shift; }
};

// ---------------------------------------------------------------- debug mode

// VLLM_NWOR_DEBUG_SYNC=1: every op waits for its kernel and raises what the kernel reported.
inline bool debug_sync() {
    static const bool enabled = [] {
        const char* value = std::getenv("VLLM_NWOR_DEBUG_SYNC");
        return value != nullptr && (std::string(value) == "1" || std::string(value) == "true");
    }();
    return enabled;
}

// The first bad value that a kernel met. `op` is a string of the host that only the host follows; carrying
// it here names the right op even where a graph replay left the report and a later call finds it.
struct ErrorRecord {
    unsigned taken;
    int problem;
    const char* op;
    int64_t index, value, limit;
};

// One for each source file, and with it everything that names it: an inline function outside this namespace
// would be merged by the linker and read the record of another file.
namespace {

__device__ ErrorRecord error_record;

// `op` is null outside debug mode: then a bad value is skipped and leaves no trace.
__device__ void report(const char* op, int problem, int64_t index, int64_t value, int64_t limit) {
    if (op == nullptr || atomicExch(&error_record.taken, 1u) != 0) return;
    error_record.problem = problem;
    error_record.op = op;
    error_record.index = index;
    error_record.value = value;
    error_record.limit = limit;
}

inline const char* report_as(const char* op) {
    return debug_sync() ? op : nullptr;
}

// The end of every host function. `complain` words and throws a report. A stream that is being captured
// must not be waited for: the report of a replay waits in the record for the next eager call.
template <class Complain>
void check_launch(const Launch& launch, const Complain& complain) {
    STD_CUDA_KERNEL_LAUNCH_CHECK();
    if (!debug_sync()) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(launch.stream(), &capture));
    if (capture != cudaStreamCaptureStatusNone) return;
    ErrorRecord found{};
    STD_CUDA_CHECK(cudaMemcpyFromSymbolAsync(&found, error_record, sizeof found, 0, cudaMemcpyDeviceToHost,
                                             launch.stream()));
    STD_CUDA_CHECK(cudaStreamSynchronize(launch.stream()));
    if (found.taken == 0) return;
    const ErrorRecord none{};
    STD_CUDA_CHECK(cudaMemcpyToSymbolAsync(error_record, &none, sizeof none, 0, cudaMemcpyHostToDevice,
                                           launch.stream()));
    STD_CUDA_CHECK(cudaStreamSynchronize(launch.stream()));
    complain(found);
}

}  // namespace

}  // namespace nwor
