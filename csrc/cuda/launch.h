// Shared by all CUDA kernels: the shape of a launch, the stream of a launch, and the device-side record of
// invalid values, which debug mode raises.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <type_traits>

#include "../common/problems.h"

namespace nwor {

// ---------------------------------------------------------------- the shape of a launch

constexpr int kThreads = 256;  // largest block size
constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xffffffff;  // lane mask of a full warp
constexpr int64_t kMostGridYZ = 65535;
constexpr int64_t kMostRows = 1 << 30;  // row numbers, including the end, fit 31 bits
constexpr int64_t kMostBlockZ = 64;
// Two blocks per multiprocessor of an H200. With fewer rows than this, a block takes as few rows as a full
// warp allows, so that the rows spread over the chip.
constexpr int64_t kEnoughBlocks = 264;

struct LaunchShape {
    dim3 grid, block;
    size_t shared_bytes = 0;
};

constexpr int64_t ceil_div(int64_t n, int64_t d) {
    return (n + d - 1) / d;
}

// Rows of `heads` x `columns` accesses, with one thread per access. threadIdx.x and blockIdx.z walk along a
// head. threadIdx.y and blockIdx.y walk over the heads, and threadIdx.z and blockIdx.x over the rows. So no
// thread needs a division to find its element. A row without accesses still has its leading thread, which
// does the work per row: it marks the row, and reports an invalid one.
inline LaunchShape shape_for_rows(const char* op, int64_t rows, int64_t heads, int64_t columns) {
    heads = std::max<int64_t>(heads, 1);
    columns = std::max<int64_t>(columns, 1);
    const int64_t x = std::min<int64_t>(columns, kThreads);
    const int64_t y = std::min<int64_t>(heads, kThreads / x);
    int64_t z = std::min(kThreads / (x * y), kMostBlockZ);
    while (z > 1 && x * y * z > kWarp && rows < z * kEnoughBlocks) z = (z + 1) / 2;
    const int64_t grid_x = ceil_div(rows, z), grid_y = ceil_div(heads, y), grid_z = ceil_div(columns, x);
    if (rows > kMostRows || grid_y > kMostGridYZ || grid_z > kMostGridYZ)
        fail(op, "rows must fit in one launch, got ", rows, " of ", heads, " x ", columns, " accesses");
    return {dim3(static_cast<unsigned>(grid_x), static_cast<unsigned>(grid_y), static_cast<unsigned>(grid_z)),
            dim3(static_cast<unsigned>(x), static_cast<unsigned>(y), static_cast<unsigned>(z))};
}

// One thread per item, and at least one block.
inline LaunchShape shape_for_items(int64_t items) {
    return {dim3(static_cast<unsigned>(std::max<int64_t>(ceil_div(items, kThreads), 1))), dim3(kThreads)};
}

__device__ inline uint32_t thread_of_block() {
    return threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
}

__device__ inline int64_t row_of_thread() {
    return static_cast<int64_t>(blockIdx.x) * blockDim.z + threadIdx.z;
}

// One access of a row.
struct Place {
    uint32_t head, column;

    __device__ bool leads_row() const { return head == 0 && column == 0; }
};

__device__ inline Place place_of_thread() {
    return {blockIdx.y * blockDim.y + threadIdx.y, blockIdx.z * blockDim.x + threadIdx.x};
}

// ---------------------------------------------------------------- early launches

// A kernel of this library may be set up while the previous kernel of the stream still runs (programmatic
// dependent launch, compute capability 9.0). This hides most of the cost of a launch. It is safe because
// every thread of every kernel starts with this wait. Only work on the shared memory of a block may
// come earlier. After the wait, earlier kernels have finished and their writes are visible. A thread that
// returned without it would let this kernel finish before its predecessor, and a following ordinary kernel
// would start too early. A kernel lets the next one start only after the wait, so at most two kernels
// overlap, whatever other libraries' kernels do before their own waits.
__device__ inline void let_next_kernel_in() {
#if __CUDA_ARCH__ >= 900
    cudaTriggerProgrammaticLaunchCompletion();
#endif
}

__device__ inline void wait_for_earlier_kernels() {
#if __CUDA_ARCH__ >= 900
    cudaGridDependencySynchronize();
#endif
    // A large grid lets it start late, or at its end, because waiting blocks would displace working ones.
    if (gridDim.x <= kEnoughBlocks) let_next_kernel_in();
}

// In a graph, an early launch pays only after a kernel that lets it start, as ours do. After another kernel,
// an early kernel starts later than an ordinary one, by 0.2 us on an H200. So a captured kernel is launched
// early only after one of ours.

// The last node captured from a stream; none if the next node will follow several.
struct CapturedNode {
    unsigned long long capture = 0;  // id of the capture; 0: none
    cudaGraphNode_t node = nullptr;

    bool operator==(const CapturedNode& other) const {
        return capture == other.capture && node == other.node;
    }
};

inline CapturedNode last_captured(cudaStream_t stream) {
    cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
    CapturedNode last;
    const cudaGraphNode_t* nodes = nullptr;
    const cudaGraphEdgeData* edges = nullptr;
    size_t count = 0;
#if CUDART_VERSION >= 13000
    const auto ask = cudaStreamGetCaptureInfo;
#else
    const auto ask = cudaStreamGetCaptureInfo_v3;
#endif
    if (ask(stream, &status, &last.capture, nullptr, &nodes, &edges, &count) != cudaSuccess) {
        cudaGetLastError();  // the launch will fail and give the reason
        return {};
    }
    if (status != cudaStreamCaptureStatusActive) return {};
    if (count == 1) last.node = nodes[0];
    return last;
}

inline thread_local CapturedNode last_of_ours;  // last node of this library's kernels, in this thread

// ---------------------------------------------------------------- division by multiplication

// n / divisor for 0 <= n < 2^31, by a multiplication and a shift (Granlund and Montgomery, 1994). An integer
// division takes a GPU about twenty instructions.
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

// With VLLM_NWOR_DEBUG_SYNC=1, every op waits for its kernel and raises what the kernel reported.
inline bool debug_sync() {
    static const bool enabled = [] {
        const char* value = std::getenv("VLLM_NWOR_DEBUG_SYNC");
        return value != nullptr && (std::string(value) == "1" || std::string(value) == "true");
    }();
    return enabled;
}

// The first invalid value that a kernel found. `op` is a host string that only the host dereferences. It
// names the right op even if a graph replay made the report and a later call raises it.
struct ErrorRecord {
    unsigned taken;
    const char* op;
    Found found;
};

// One record per source file. Everything that refers to it must be in this anonymous namespace too: the
// linker would merge an inline function outside it, which could then read the record of another file.
namespace {

__device__ ErrorRecord error_record;

// `op` is null outside debug mode: an invalid value is then skipped without a report.
__device__ void report(const char* op, const Found& found) {
    if (op == nullptr || atomicExch(&error_record.taken, 1u) != 0) return;
    error_record.op = op;
    error_record.found = found;
}

inline const char* report_as(const char* op) {
    return debug_sync() ? op : nullptr;
}

// ---------------------------------------------------------------- a launch

// Makes the device of an op's arguments current, and finds torch's stream there. `run` of common/op.h takes
// it.
class Launch {
  public:
    explicit Launch(const Tensor& tensor) : like_(tensor), device_(tensor.get_device_index()) {
        // In most calls the device is current. A guard costs the host more than asking.
        int current = -1;
        if (cudaGetDevice(&current) != cudaSuccess || current != device_) guard_.emplace(device_);
        void* stream = nullptr;
        NWOR_TORCH_CHECK(aoti_torch_get_current_cuda_stream(device_, &stream));
        stream_ = static_cast<cudaStream_t>(stream);
    }
    cudaStream_t stream() const { return stream_; }
    int32_t device() const { return device_; }
    const Tensor& like() const { return like_; }  // the first argument on the device

    template <class... Arguments>
    void start(void (*kernel)(Arguments...), const LaunchShape& shape,
               const std::common_type_t<Arguments>&... arguments) const {
        const CapturedNode before = last_captured(stream_);
        const bool behind_ours = before.node != nullptr && before == last_of_ours;
        cudaLaunchAttribute early{};
        early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
        early.val.programmaticStreamSerializationAllowed = 1;
        cudaLaunchConfig_t config{};
        config.gridDim = shape.grid;
        config.blockDim = shape.block;
        config.dynamicSmemBytes = shape.shared_bytes;
        config.stream = stream_;
        config.attrs = &early;
        config.numAttrs =
            (before.capture == 0 || behind_ours) && waits(reinterpret_cast<const void*>(kernel)) ? 1 : 0;
        const cudaError_t launched = cudaLaunchKernelEx(&config, kernel, arguments...);
        if (launched != cudaSuccess) {
            cudaGetLastError();  // otherwise the next check of another library would see the error again
            STD_CUDA_CHECK(launched);
        }
        if (before.capture != 0) last_of_ours = last_captured(stream_);
    }

  private:
    // Whether the code for this device contains the wait. It does if it was compiled for 9.0 or later and not
    // made by the driver from older PTX. All kernels of a library are compiled for the same architectures.
    bool waits(const void* kernel) const {
        static std::array<std::atomic<int>, 64> known{};  // by device; 0 = unknown
        std::atomic<int>& version = known[device_ % known.size()];
        if (version == 0) {
            cudaFuncAttributes attributes{};
            STD_CUDA_CHECK(cudaFuncGetAttributes(&attributes, kernel));
            version = attributes.ptxVersion;
        }
        return version >= 90;
    }

    const Tensor& like_;
    int32_t device_;
    std::optional<DeviceGuard> guard_;
    cudaStream_t stream_;
};

// Called at the end of every host function. In debug mode it raises what a kernel reported. (`start` raises
// the error of a launch.) A stream that is being captured must not be synchronized. The record keeps the
// report of a replay until the next eager call.
inline void check_launch(const Launch& launch) {
    if (!debug_sync()) return;
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    STD_CUDA_CHECK(cudaStreamIsCapturing(launch.stream(), &capture));
    if (capture != cudaStreamCaptureStatusNone) return;
    ErrorRecord record{};
    STD_CUDA_CHECK(cudaMemcpyFromSymbolAsync(&record, error_record, sizeof record, 0, cudaMemcpyDeviceToHost,
                                             launch.stream()));
    STD_CUDA_CHECK(cudaStreamSynchronize(launch.stream()));
    if (record.taken == 0) return;
    const ErrorRecord none{};
    STD_CUDA_CHECK(cudaMemcpyToSymbolAsync(error_record, &none, sizeof none, 0, cudaMemcpyHostToDevice,
                                           launch.stream()));
    STD_CUDA_CHECK(cudaStreamSynchronize(launch.stream()));
    complain(record.op, record.found);
}

}  // namespace

}  // namespace nwor
