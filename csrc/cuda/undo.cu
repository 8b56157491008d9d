// Family undo on CUDA: write, write with a log, log, restore. Semantics: nwor_ops/ops.py.
//
// A row of a cache, a source or a log is [H, W]. The host picks the widest access (16 bytes down to one
// element) that every pointer and stride of a call allows, and hands the kernels strides in *units*: what
// one access moves. Each thread owns its units from load to store, so no order between threads is assumed.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../dispatch.h"
#include "launch.h"

namespace nwor {
namespace {

constexpr int kUnitsPerThread = 2;   // loaded together, then stored together
constexpr int kLayersPerThread = 4;  // restore: the layers share slot, flag and offsets
constexpr int64_t kWidestAccess = 16;
// Base addresses that fit in a launch's parameters (4 KB in all); more layers take another launch.
constexpr int64_t kLayersPerLaunch = 384;

// ---------------------------------------------------------------- what a kernel may meet

enum Problem { kSlotMapping = 1, kRowSlots, kLogRows, kPageOffsets };

[[noreturn]] void complain(const ErrorRecord& e) {
    switch (e.problem) {
        case kSlotMapping:
        case kRowSlots:
            fail<std::out_of_range>(e.op, e.problem == kSlotMapping ? "slot_mapping[" : "row_slots[", e.index,
                                    "] must be below ", e.limit, " (num_blocks * block_size), got ", e.value);
        case kLogRows:
            fail<std::out_of_range>(e.op, "log_rows[", e.index, "] must be below the ", e.limit,
                                    " rows of the log, got ", e.value);
        default:
            fail<std::out_of_range>(e.op, "page_offsets must lie within the storage of the cache (", e.limit,
                                    " elements), got the place ", e.value);
    }
}

// ---------------------------------------------------------------- places, in units

// The units of a row [H, W], numbered 0 .. num_units - 1.
struct RowUnits {
    uint32_t num_units;
    FastDivisor per_head;
};

struct Place {
    int64_t head, column;
};

__device__ Place place_of(const RowUnits& row, uint32_t unit) {
    const uint32_t head = row.per_head.quotient(unit);
    return {head, unit - head * row.per_head.divisor};
}

__device__ int64_t offset_in(const RowsView& rows, int64_t row, const Place& p) {
    return row * rows.row_stride + p.head * rows.head_stride + p.column * rows.width_stride;
}

struct Pages {
    char* data;
    int64_t num_slots, block_size;
    int64_t block_stride, slot_stride, head_stride, width_stride;
    FastDivisor by_block_size;
    PageOffsets offsets;
};

// One slot of a paged cache. With kTable the inner order of a page comes from a table, else from strides.
template <bool kTable>
struct Slot {
    int64_t start;
    const int32_t* table;

    __device__ Slot(const Pages& pages, int64_t slot) {
        // Slots fit in 31 bits but for caches of more than 2^31 of them.
        const int64_t block = pages.num_slots <= INT32_MAX
                                  ? pages.by_block_size.quotient(static_cast<uint32_t>(slot))
                                  : slot / pages.block_size;
        const int64_t in_block = slot - block * pages.block_size;
        start = block * pages.block_stride + (kTable ? 0 : in_block * pages.slot_stride);
        table = kTable ? pages.offsets.table + in_block * pages.width_stride : nullptr;
    }
    __device__ int64_t offset(const Pages& pages, const Place& p) const {
        const int64_t column = kTable ? table[p.column] : p.column * pages.width_stride;
        if (kTable && column < 0) return column;  // of no page: within() refuses it
        return start + p.head * pages.head_stride + column;
    }
};

// Whether a place may be touched; strides stay inside a tensor, a table may say anything.
template <bool kTable>
__device__ bool within(const Pages& pages, int64_t offset, const char* report_as) {
    if (!kTable || (offset >= 0 && offset < pages.offsets.limit)) return true;
    report(report_as, kPageOffsets, 0, offset, pages.offsets.limit);
    return false;
}

// ---------------------------------------------------------------- the host's side of units

RowUnits row_units(const char* op, const CacheView& cache, int64_t elements) {
    const int64_t per_head = cache.width / elements;
    if (cache.num_heads * cache.width > INT32_MAX)
        fail(op, "num_kv_heads * width must be below 2^31, got ", cache.num_heads, " * ", cache.width);
    return {static_cast<uint32_t>(cache.num_heads * per_head), FastDivisor(per_head)};
}

RowsView in_units(RowsView rows, int64_t elements) {
    rows.row_stride /= elements;
    rows.head_stride /= elements;
    return rows;  // more than one element at a time only where the width stride is 1
}

Pages in_units(const CacheView& c, int64_t elements, const PageOffsets& offsets = {}) {
    Pages pages{c.data,
                c.num_blocks * c.block_size,
                c.block_size,
                c.block_stride / elements,
                c.slot_stride / elements,
                c.head_stride / elements,
                c.width_stride,
                FastDivisor(c.block_size),
                offsets};
    if (offsets.table != nullptr) pages.width_stride = c.width;  // of the table, which replaces it
    return pages;
}

bool aligned(const void* data, int64_t bytes) {
    return reinterpret_cast<uintptr_t>(data) % bytes == 0;
}

// Whether every unit of `elements` elements of the view is contiguous and aligned. The stride of a
// dimension of size one is never used and may be anything.
bool fits(const CacheView& c, int64_t elements) {
    return c.width_stride == 1 && c.width % elements == 0 && aligned(c.data, elements * c.element_size) &&
           (c.num_blocks <= 1 || c.block_stride % elements == 0) &&
           (c.block_size <= 1 || c.slot_stride % elements == 0) &&
           (c.num_heads <= 1 || c.head_stride % elements == 0);
}

bool fits(const RowsView& r, const CacheView& shape, int64_t element_size, int64_t elements) {
    return r.width_stride == 1 && aligned(r.data, elements * element_size) && r.row_stride % elements == 0 &&
           (shape.num_heads <= 1 || r.head_stride % elements == 0);
}

template <class Fits>
int64_t elements_per_access(int64_t element_size, const Fits& fits) {
    int64_t elements = kWidestAccess / element_size;
    while (elements > 1 && !fits(elements)) elements /= 2;
    return elements;
}

// ---------------------------------------------------------------- write_kv, write_kv_logged

// How one unit of the source becomes one unit of the cache: bytes as they are,
template <class T>
struct Copy {
    using Source = T;
    using Cache = T;
    __device__ static Cache apply(const Source& source, const ScaleView&, int64_t, int64_t, Format) {
        return source;
    }
};

template <class T, int kElements>
struct alignas(sizeof(T) * kElements) Vector {
    T values[kElements];
};

__device__ float as_float(float x) {
    return x;
}
__device__ float as_float(__half x) {
    return __half2float(x);
}
__device__ float as_float(__nv_bfloat16 x) {
    return __bfloat162float(x);
}

// or 8-bit floats, as vLLM's fp8::scaled_convert makes them: a division, then a saturating conversion.
template <class T, int kElements>
struct Quantize {
    using Source = Vector<T, kElements>;
    using Cache = Vector<__nv_fp8_storage_t, kElements>;
    __device__ static Cache apply(const Source& source, const ScaleView& scale, int64_t token, int64_t head,
                                  Format format) {
        const float divisor = scale.data[token * scale.token_stride + head * scale.head_stride];
        const __nv_fp8_interpretation_t kind = format == Format::kE4M3 ? __NV_E4M3 : __NV_E5M2;
        Cache stored;
#pragma unroll
        for (int i = 0; i < kElements; ++i)
            stored.values[i] =
                __nv_cvt_float_to_fp8(as_float(source.values[i]) / divisor, __NV_SATFINITE, kind);
        return stored;
    }
};

struct WritePlane {
    RowUnits row;
    RowsView source, log;
    Pages cache;
    ScaleView scale;
};

struct WriteJob {
    WritePlane planes[2];  // key, value: blockIdx.z
    const int64_t* slot_mapping;
    const int32_t* log_rows;
    int64_t num_tokens, num_log_rows;
    RowWindows row_windows;
    Format format;
    const char* report_as;
};

// Where a token goes: its slot, or -1 if it is skipped, and its log row, or -1 if it is not logged. Both
// are loaded before either is tested, so that a thread waits for memory once.
struct Destination {
    int64_t slot, log_row;
};

__device__ Destination destination(const int64_t* slot_mapping, const int32_t* log_rows, int64_t token,
                                   int64_t num_slots, int64_t num_log_rows, const char* report_as) {
    Destination to{slot_mapping[token], log_rows == nullptr ? -1 : log_rows[token]};
    if (to.slot >= num_slots) {
        report(report_as, kSlotMapping, token, to.slot, num_slots);
        to.slot = -1;
    }
    if (to.slot >= 0 && to.log_row >= num_log_rows) {
        report(report_as, kLogRows, token, to.log_row, num_log_rows);
        to.log_row = -1;
    }
    return to;
}

// Notes that a row was logged in this window: once for all threads that share the row.
__device__ void mark_row(const RowWindows& row_windows, int64_t log_row) {
    if (row_windows.rows != nullptr && threadIdx.x == 0 && blockIdx.y == 0 && blockIdx.z == 0)
        row_windows.rows[log_row] = *row_windows.window_id;
}

template <class Access, bool kLogged>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ WriteJob job) {
    using Source = typename Access::Source;
    using Cache = typename Access::Cache;
    const int64_t token = row_of_thread();
    if (token >= job.num_tokens) return;
    const WritePlane& plane = job.planes[blockIdx.z];
    const Destination to = destination(job.slot_mapping, kLogged ? job.log_rows : nullptr, token,
                                       plane.cache.num_slots, job.num_log_rows, job.report_as);
    if (to.slot < 0) return;
    const bool logged = kLogged && to.log_row >= 0;

    const Slot<false> slot(plane.cache, to.slot);
    const Source* source = reinterpret_cast<const Source*>(plane.source.data);
    Cache* cache = reinterpret_cast<Cache*>(plane.cache.data);
    Cache* log = reinterpret_cast<Cache*>(plane.log.data);
    const uint32_t step = blockDim.x * kUnitsPerThread;
    for (uint32_t first = blockIdx.y * step + threadIdx.x; first < plane.row.num_units;
         first += gridDim.y * step) {
        Source fresh[kUnitsPerThread];
        Cache old[kUnitsPerThread];
        Place places[kUnitsPerThread];
        // Every load before the first store: they overlap, and the old bytes are read before this very
        // thread replaces them.
#pragma unroll
        for (int i = 0; i < kUnitsPerThread; ++i) {
            const uint32_t unit = first + i * blockDim.x;
            if (unit >= plane.row.num_units) break;
            places[i] = place_of(plane.row, unit);
            fresh[i] = source[offset_in(plane.source, token, places[i])];
            if (logged) old[i] = cache[slot.offset(plane.cache, places[i])];
        }
#pragma unroll
        for (int i = 0; i < kUnitsPerThread; ++i) {
            if (first + i * blockDim.x >= plane.row.num_units) break;
            if (logged) log[offset_in(plane.log, to.log_row, places[i])] = old[i];
            cache[slot.offset(plane.cache, places[i])] =
                Access::apply(fresh[i], plane.scale, token, places[i].head, job.format);
        }
    }
    if (logged) mark_row(job.row_windows, to.log_row);
}

WritePlane write_plane(const char* op, const RowsView& source, const CacheView& cache, const RowsView& log,
                       const ScaleView& scale, int64_t elements) {
    return {row_units(op, cache, elements), in_units(source, elements), in_units(log, elements),
            in_units(cache, elements), scale};
}

template <class Access>
void launch_write(const WriteArguments& w, int64_t elements, const Launch& launch) {
    const WriteJob job{{write_plane(w.op, w.key, w.key_cache, w.key_log, w.k_scale, elements),
                        write_plane(w.op, w.value, w.value_cache, w.value_log, w.v_scale, elements)},
                       w.slot_mapping,
                       w.log_rows,
                       w.num_tokens,
                       w.num_log_rows,
                       w.row_windows,
                       w.format,
                       report_as(w.op)};
    const int64_t key_units = job.planes[0].row.num_units, value_units = job.planes[1].row.num_units;
    const LaunchShape shape = shape_for_rows(w.num_tokens, std::max(key_units, value_units), kUnitsPerThread,
                                             value_units > 0 ? 2 : 1);
    if (w.log_rows != nullptr)
        write_kernel<Access, true><<<shape.grid, shape.block, 0, launch.stream()>>>(job);
    else
        write_kernel<Access, false><<<shape.grid, shape.block, 0, launch.stream()>>>(job);
}

// Calls `f(Tag<T>)` with an unsigned T of that many bytes, up to the widest access.
template <class F>
void with_access_type(int64_t bytes, const F& f) {
    if (bytes == kWidestAccess) return f(Tag<uint4>{});
    with_raw_type(static_cast<int32_t>(bytes), f);
}

template <class T>
void launch_quantized(const WriteArguments& w, int64_t elements, const Launch& launch) {
    if constexpr (sizeof(T) == 2)
        if (elements == 8) return launch_write<Quantize<T, 8>>(w, elements, launch);
    switch (elements) {
        case 4:
            return launch_write<Quantize<T, 4>>(w, elements, launch);
        case 2:
            return launch_write<Quantize<T, 2>>(w, elements, launch);
        default:
            return launch_write<Quantize<T, 1>>(w, elements, launch);
    }
}

bool plane_fits(const RowsView& source, int64_t source_size, const CacheView& cache, const RowsView* log,
                int64_t elements) {
    if (cache.width == 0) return true;
    return fits(cache, elements) && fits(source, cache, source_size, elements) &&
           (log == nullptr || fits(*log, cache, cache.element_size, elements));
}

void write(const WriteArguments& w, const Tensor& key_cache) {
    if (w.num_tokens == 0 || w.key_cache.num_heads * (w.key_cache.width + w.value_cache.width) == 0) return;
    const Launch launch(key_cache);
    const bool logged = w.log_rows != nullptr;
    const int64_t source_size = w.source_dtype == ScalarType::Float ? 4 : 2;
    const int64_t elements = elements_per_access(source_size, [&](int64_t n) {
        return plane_fits(w.key, source_size, w.key_cache, logged ? &w.key_log : nullptr, n) &&
               plane_fits(w.value, source_size, w.value_cache, logged ? &w.value_log : nullptr, n);
    });
    if (w.format == Format::kCopy)
        with_access_type(elements * source_size, [&](auto tag) {
            launch_write<Copy<typename decltype(tag)::type>>(w, elements, launch);
        });
    else if (w.source_dtype == ScalarType::Float)
        launch_quantized<float>(w, elements, launch);
    else if (w.source_dtype == ScalarType::Half)
        launch_quantized<__half>(w, elements, launch);
    else
        launch_quantized<__nv_bfloat16>(w, elements, launch);
    check_launch(launch, complain);
}

void write_kv(const Tensor& key, const Tensor& value, const Tensor& key_cache, const Tensor& value_cache,
              const Tensor& slot_mapping, const Tensor& k_scale, const Tensor& v_scale,
              const std::string& kv_cache_dtype) {
    write(check_write("write_kv", key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale,
                      kv_cache_dtype),
          key_cache);
}

void write_kv_logged(const Tensor& key, const Tensor& value, const Tensor& key_cache,
                     const Tensor& value_cache, const Tensor& slot_mapping, const Tensor& k_scale,
                     const Tensor& v_scale, const std::string& kv_cache_dtype, const Tensor& log_rows,
                     const Tensor& key_log, const Tensor& value_log, const std::optional<Tensor>& window_id,
                     const std::optional<Tensor>& row_windows) {
    WriteArguments w = check_write("write_kv_logged", key, value, key_cache, value_cache, slot_mapping,
                                   k_scale, v_scale, kv_cache_dtype);
    check_write_log(w, key, value, key_cache, value_cache, log_rows, key_log, value_log, window_id,
                    row_windows);
    write(w, key_cache);
}

// ---------------------------------------------------------------- log_slots

struct LogJob {
    RowUnits row;
    Pages cache;
    RowsView log;
    const int64_t* slot_mapping;
    const int32_t* log_rows;
    int64_t num_tokens, num_log_rows;
    RowWindows row_windows;
    const char* report_as;
};

template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) log_kernel(const __grid_constant__ LogJob job) {
    const int64_t token = row_of_thread();
    if (token >= job.num_tokens) return;
    const Destination to = destination(job.slot_mapping, job.log_rows, token, job.cache.num_slots,
                                       job.num_log_rows, job.report_as);
    if (to.slot < 0 || to.log_row < 0) return;

    const Slot<kTable> slot(job.cache, to.slot);
    const Unit* cache = reinterpret_cast<const Unit*>(job.cache.data);
    Unit* log = reinterpret_cast<Unit*>(job.log.data);
    const uint32_t step = gridDim.y * blockDim.x;
    for (uint32_t unit = blockIdx.y * blockDim.x + threadIdx.x; unit < job.row.num_units; unit += step) {
        const Place place = place_of(job.row, unit);
        const int64_t from = slot.offset(job.cache, place);
        if (!within<kTable>(job.cache, from, job.report_as)) continue;
        log[offset_in(job.log, to.log_row, place)] = cache[from];
    }
    mark_row(job.row_windows, to.log_row);
}

void log_slots(const Tensor& cache, const Tensor& slot_mapping, const Tensor& log_rows, const Tensor& log,
               const std::optional<Tensor>& page_offsets, const std::optional<Tensor>& window_id,
               const std::optional<Tensor>& row_windows) {
    const LogArguments l =
        check_log_slots(cache, slot_mapping, log_rows, log, page_offsets, window_id, row_windows);
    if (l.num_tokens == 0 || l.cache.num_heads * l.cache.width == 0) return;
    const Launch launch(cache);
    const bool table = l.page_offsets.table != nullptr;
    const int64_t size = l.cache.element_size;
    const int64_t elements = elements_per_access(
        size, [&](int64_t n) { return !table && fits(l.cache, n) && fits(l.log, l.cache, size, n); });
    const LogJob job{row_units(l.op, l.cache, elements),
                     in_units(l.cache, elements, l.page_offsets),
                     in_units(l.log, elements),
                     l.slot_mapping,
                     l.log_rows,
                     l.num_tokens,
                     l.num_log_rows,
                     l.row_windows,
                     report_as(l.op)};
    const LaunchShape shape = shape_for_rows(l.num_tokens, job.row.num_units, 1, 1);
    if (table)
        with_raw_type(l.cache.element_size, [&](auto tag) {
            log_kernel<typename decltype(tag)::type, true>
                <<<shape.grid, shape.block, 0, launch.stream()>>>(job);
        });
    else
        with_access_type(elements * size, [&](auto tag) {
            log_kernel<typename decltype(tag)::type, false>
                <<<shape.grid, shape.block, 0, launch.stream()>>>(job);
        });
    check_launch(launch, complain);
}

// ---------------------------------------------------------------- restore_slots

struct RestoreJob {
    char* caches[kLayersPerLaunch];
    RowUnits row;
    Pages pages;   // of every layer; `data` is not used
    RowsView log;  // of the first layer of this launch
    int64_t log_layer_stride;
    int num_layers;
    int64_t num_rows;
    const int64_t* row_slots;
    const bool* row_rejected;
    RowWindows row_windows;  // from the first layer of this launch on
    const char* report_as;
};
static_assert(sizeof(RestoreJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

// Which of a thread's layers logged the row in this window, one bit each.
__device__ unsigned layers_to_restore(const RestoreJob& job, int first_layer, int64_t row) {
    const int layers = min(kLayersPerThread, job.num_layers - first_layer);
    if (job.row_windows.rows == nullptr) return (1u << layers) - 1;
    unsigned logged = 0;
    for (int i = 0; i < layers; ++i)
        if (job.row_windows.rows[(first_layer + i) * job.num_rows + row] == *job.row_windows.window_id)
            logged |= 1u << i;
    return logged;
}

template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) restore_kernel(const __grid_constant__ RestoreJob job) {
    const int64_t row = row_of_thread();
    if (row >= job.num_rows || !job.row_rejected[row]) return;
    const int64_t slot_number = job.row_slots[row];
    if (slot_number < 0) return;
    if (slot_number >= job.pages.num_slots)
        return report(job.report_as, kRowSlots, row, slot_number, job.pages.num_slots);

    const Slot<kTable> slot(job.pages, slot_number);
    const int first_layer = blockIdx.z * kLayersPerThread;
    const unsigned layers = layers_to_restore(job, first_layer, row);
    if (layers == 0) return;
    const Unit* log = reinterpret_cast<const Unit*>(job.log.data) + first_layer * job.log_layer_stride;
    const uint32_t step = gridDim.y * blockDim.x;
    for (uint32_t unit = blockIdx.y * blockDim.x + threadIdx.x; unit < job.row.num_units; unit += step) {
        const Place place = place_of(job.row, unit);
        const int64_t from = offset_in(job.log, row, place), to = slot.offset(job.pages, place);
        if (!within<kTable>(job.pages, to, job.report_as)) continue;
        Unit saved[kLayersPerThread];
#pragma unroll
        for (int i = 0; i < kLayersPerThread; ++i)
            if (layers >> i & 1) saved[i] = log[i * job.log_layer_stride + from];
#pragma unroll
        for (int i = 0; i < kLayersPerThread; ++i)
            if (layers >> i & 1) reinterpret_cast<Unit*>(job.caches[first_layer + i])[to] = saved[i];
    }
}

bool layers_fit(const RestoreArguments& r, const std::vector<Tensor>& caches, int64_t elements) {
    if (r.num_layers > 1 && r.log_layer_stride % elements != 0) return false;
    if (!fits(r.log, r.cache, r.cache.element_size, elements)) return false;
    return std::all_of(caches.begin(), caches.end(), [&](const Tensor& cache) {
        CacheView view = r.cache;
        view.data = static_cast<char*>(cache.data_ptr());
        return fits(view, elements);
    });
}

// One launch for the layers [first, first + count).
void launch_restore(const RestoreArguments& r, const std::vector<Tensor>& caches, int64_t first,
                    int64_t count, int64_t elements, const Launch& launch) {
    RestoreJob job{};
    for (int64_t i = 0; i < count; ++i) job.caches[i] = static_cast<char*>(caches[first + i].data_ptr());
    job.row = row_units(r.op, r.cache, elements);
    job.pages = in_units(r.cache, elements, r.page_offsets);
    job.log = in_units(r.log, elements);
    job.log.data += first * r.log_layer_stride * r.cache.element_size;
    job.log_layer_stride = r.log_layer_stride / elements;
    job.num_layers = static_cast<int>(count);
    job.num_rows = r.num_rows;
    job.row_slots = r.row_slots;
    job.row_rejected = r.row_rejected;
    job.row_windows = r.row_windows;
    if (r.row_windows.rows != nullptr) job.row_windows.rows += first * r.num_rows;
    job.report_as = report_as(r.op);
    const LaunchShape shape =
        shape_for_rows(r.num_rows, job.row.num_units, 1, ceil_div(count, kLayersPerThread));
    if (r.page_offsets.table != nullptr)
        with_raw_type(r.cache.element_size, [&](auto tag) {
            restore_kernel<typename decltype(tag)::type, true>
                <<<shape.grid, shape.block, 0, launch.stream()>>>(job);
        });
    else
        with_access_type(elements * r.cache.element_size, [&](auto tag) {
            restore_kernel<typename decltype(tag)::type, false>
                <<<shape.grid, shape.block, 0, launch.stream()>>>(job);
        });
}

void restore_slots(const std::vector<Tensor>& caches, const Tensor& log, const Tensor& row_slots,
                   const Tensor& row_rejected, const std::optional<Tensor>& page_offsets,
                   const std::optional<Tensor>& window_id, const std::optional<Tensor>& row_windows) {
    const RestoreArguments r =
        check_restore(caches, log, row_slots, row_rejected, page_offsets, window_id, row_windows);
    if (r.num_rows == 0 || r.cache.num_heads * r.cache.width == 0) return;
    const Launch launch(caches[0]);
    const int64_t elements = elements_per_access(r.cache.element_size, [&](int64_t n) {
        return r.page_offsets.table == nullptr && layers_fit(r, caches, n);
    });
    for (int64_t first = 0; first < r.num_layers; first += kLayersPerLaunch)
        launch_restore(r, caches, first, std::min(kLayersPerLaunch, r.num_layers - first), elements, launch);
    check_launch(launch, complain);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    m.impl("write_kv", TORCH_BOX(&write_kv));
    m.impl("write_kv_logged", TORCH_BOX(&write_kv_logged));
    m.impl("log_slots", TORCH_BOX(&log_slots));
    m.impl("restore_slots", TORCH_BOX(&restore_slots));
}

}  // namespace nwor
