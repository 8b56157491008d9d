// Family undo on CUDA: write, write with a log, log, restore. Semantics: nwor_ops/ops.py.
//
// A row of a cache, a source or a log is [H, W]. The host picks the widest access (16 bytes down to one
// element) that every pointer and stride of a call allows, and hands the kernels strides in *units*: what
// one access moves. Each thread owns its units from load to store, so no order between threads is assumed,
// and loads all of them, and whatever says where they go, before it stores the first.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../dispatch.h"
#include "launch.h"

namespace nwor {

template <>
struct RawOf<16> {
    using type = uint4;
};

namespace {

constexpr int kPlanes = 2;           // of a writer: key and value
constexpr int kRowsPerThread = 2;    // log: rows whose loads overlap
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

__device__ int64_t offset_in(const RowsView& rows, int64_t row, const Place& p) {
    return row * rows.row_stride + p.head * rows.head_stride + p.column * rows.width_stride;
}

struct Slots {
    int64_t count;
    FastDivisor by_block_size;
};

struct Pages {
    char* data;
    int64_t block_stride, slot_stride, head_stride, width_stride;
    PageOffsets offsets;
};

// One slot of a paged cache. With kTable the inner order of a page comes from a table, else from strides.
template <bool kTable>
struct Slot {
    uint32_t block, in_block;

    __device__ Slot(const Slots& slots, int64_t slot) {
        const uint32_t number = static_cast<uint32_t>(slot);
        block = slots.by_block_size.quotient(number);
        in_block = number - block * slots.by_block_size.divisor;
    }
    __device__ int64_t offset(const Pages& pages, const Place& p) const {
        const int64_t in_page = block * pages.block_stride + p.head * pages.head_stride;
        if (!kTable) return in_page + in_block * pages.slot_stride + p.column * pages.width_stride;
        const int64_t element = pages.offsets.table[in_block * pages.width_stride + p.column];
        return element < 0 ? element : in_page + element;  // of no page: within() refuses it
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

// How many rows [num_heads, columns] of units a cache has room for.
struct RowShape {
    uint32_t num_heads, columns;

    RowShape() = default;
    RowShape(const char* op, const CacheView& c, int64_t elements) {
        if (c.num_heads * c.width > INT32_MAX || c.num_slots() > INT32_MAX)
            fail(op, "a cache must have fewer than 2^31 slots and fewer than 2^31 elements in each, got ",
                 c.num_slots(), " of ", c.num_heads, " * ", c.width);
        num_heads = static_cast<uint32_t>(c.num_heads);
        columns = static_cast<uint32_t>(c.width / elements);
    }
    __device__ bool has(const Place& p) const { return p.head < num_heads && p.column < columns; }
};

Slots slots_of(const CacheView& c) {
    return {c.num_slots(), FastDivisor(c.block_size)};
}

RowsView in_units(RowsView rows, int64_t elements) {
    rows.row_stride /= elements;
    rows.head_stride /= elements;
    return rows;  // more than one element at a time only where the width stride is 1
}

Pages in_units(const CacheView& c, int64_t elements, const PageOffsets& offsets = {}) {
    Pages pages{
        c.data, c.block_stride / elements, c.slot_stride / elements, c.head_stride / elements, c.width_stride,
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

// ---------------------------------------------------------------- where a token goes

// The slot of a token, or less than 0 if it is skipped, and its log row, or less than 0 if it is not logged.
struct Destination {
    int64_t slot, log_row;
};

struct Limits {
    Slots slots;
    int64_t num_log_rows;
    const char* report_as;
};

// Loading is apart from judging, so that what else a thread needs is loaded at the same time.
__device__ Destination destination(const int64_t* slot_mapping, const int32_t* log_rows, int64_t token) {
    return {slot_mapping[token], log_rows == nullptr ? -1 : log_rows[token]};
}

__device__ Destination checked(Destination to, int64_t token, const Limits& limits) {
    if (to.slot >= limits.slots.count) {
        report(limits.report_as, kSlotMapping, token, to.slot, limits.slots.count);
        to.slot = -1;
    }
    if (to.slot >= 0 && to.log_row >= limits.num_log_rows) {
        report(limits.report_as, kLogRows, token, to.log_row, limits.num_log_rows);
        to.log_row = -1;
    }
    return to;
}

// The thread that leads a row marks it as logged, with a number that it has loaded before.
__device__ bool marks_row(const RowWindows& row_windows, const Place& place) {
    return row_windows.rows != nullptr && place.leads_row();
}

// ---------------------------------------------------------------- write_kv, write_kv_logged

// How one unit of the source becomes one unit of the cache: bytes as they are,
template <class T>
struct Copy {
    using Source = T;
    using Cache = T;
    static constexpr bool kScaled = false;
    __device__ static Cache apply(const Source& source, float, Format) { return source; }
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

// or 8-bit floats, as vLLM's fp8::scaled_convert makes them: a division, then a saturating conversion. (One
// reciprocal and exact corrections instead of the divisions were slower but for a few tokens.)
template <class T, int kElements>
struct Quantize {
    using Source = typename RawOf<sizeof(T) * kElements>::type;
    using Cache = typename RawOf<kElements>::type;
    static constexpr bool kScaled = true;

    template <__nv_fp8_interpretation_t kKind>
    __device__ static Cache converted(const float* x) {
        if constexpr (kElements == 1) {
            return __nv_cvt_float_to_fp8(x[0], __NV_SATFINITE, kKind);
        } else {
            Cache stored = 0;
#pragma unroll
            for (int i = 0; i < kElements; i += 2) {
                const Cache pair = __nv_cvt_float2_to_fp8x2({x[i], x[i + 1]}, __NV_SATFINITE, kKind);
                stored |= pair << (8 * i);
            }
            return stored;
        }
    }
    __device__ static Cache apply(const Source& source, float scale, Format format) {
        T values[kElements];
        memcpy(values, &source, sizeof source);
        float x[kElements];
#pragma unroll
        for (int i = 0; i < kElements; ++i) x[i] = as_float(values[i]) / scale;
        return format == Format::kE4M3 ? converted<__NV_E4M3>(x) : converted<__NV_E5M2>(x);
    }
};

struct WritePlane {
    RowShape row;
    RowsView source, log;
    Pages cache;
    ScaleView scale;
};

struct WriteJob {
    WritePlane planes[kPlanes];
    const int64_t* slot_mapping;
    const int32_t* log_rows;
    int64_t num_tokens;
    Limits limits;
    RowWindows row_windows;
    Format format;
};

// A thread moves the same place of key and value: in a packed row they are neighbours.
template <class Access, bool kLogged>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ WriteJob job) {
    using Source = typename Access::Source;
    using Cache = typename Access::Cache;
    const int64_t token = row_of_thread();
    const Place place = place_of_thread();
    const bool has[kPlanes] = {job.planes[0].row.has(place), job.planes[1].row.has(place)};
    wait_for_earlier_kernels();
    if (token >= job.num_tokens) return;
    const Destination wanted = destination(job.slot_mapping, kLogged ? job.log_rows : nullptr, token);
    const bool marks = kLogged && marks_row(job.row_windows, place);
    const int64_t window = marks ? *job.row_windows.window_id : 0;
    Source fresh[kPlanes];
    float scale[kPlanes];
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) {
        const WritePlane& plane = job.planes[i];
        if (!has[i]) continue;
        fresh[i] = reinterpret_cast<const Source*>(plane.source.data)[offset_in(plane.source, token, place)];
        if (Access::kScaled)
            scale[i] =
                plane.scale.data[token * plane.scale.token_stride + place.head * plane.scale.head_stride];
    }

    const Destination to = checked(wanted, token, job.limits);
    if (to.slot < 0) return;
    const bool logged = kLogged && to.log_row >= 0;
    const Slot<false> slot(job.limits.slots, to.slot);
    Cache* at[kPlanes];
    Cache old[kPlanes];
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) {
        const WritePlane& plane = job.planes[i];
        at[i] = reinterpret_cast<Cache*>(plane.cache.data) + slot.offset(plane.cache, place);
        if (logged && has[i]) old[i] = __ldcs(at[i]);  // not read again: about to be replaced
    }
#pragma unroll
    for (int i = 0; i < kPlanes; ++i)
        if (has[i]) *at[i] = Access::apply(fresh[i], scale[i], job.format);
    let_next_kernel_in();  // what is left waits for the old bytes
#pragma unroll
    for (int i = 0; i < kPlanes; ++i) {
        const RowsView& log = job.planes[i].log;
        if (logged && has[i]) reinterpret_cast<Cache*>(log.data)[offset_in(log, to.log_row, place)] = old[i];
    }
    if (logged && marks) job.row_windows.rows[to.log_row] = window;
}

WritePlane write_plane(const char* op, const RowsView& source, const CacheView& cache, const RowsView& log,
                       const ScaleView& scale, int64_t elements) {
    return {RowShape(op, cache, elements), in_units(source, elements), in_units(log, elements),
            in_units(cache, elements), scale};
}

template <class Access>
void launch_write(const WriteArguments& w, int64_t elements, const Launch& launch) {
    const WriteJob job{{write_plane(w.op, w.key, w.key_cache, w.key_log, w.k_scale, elements),
                        write_plane(w.op, w.value, w.value_cache, w.value_log, w.v_scale, elements)},
                       w.slot_mapping,
                       w.log_rows,
                       w.num_tokens,
                       {slots_of(w.key_cache), w.num_log_rows, report_as(w.op)},
                       w.row_windows,
                       w.format};
    const RowShape &key = job.planes[0].row, &value = job.planes[1].row;
    launch.start(w.log_rows != nullptr ? write_kernel<Access, true> : write_kernel<Access, false>,
                 shape_for_rows(w.op, w.num_tokens, key.num_heads, std::max(key.columns, value.columns)),
                 job);
}

// Calls `f(Tag<T>)` with an unsigned T of that many bytes, up to the widest access.
template <class F>
void with_access_type(int64_t bytes, const F& f) {
    if (bytes == kWidestAccess) return f(Tag<RawOf<kWidestAccess>::type>{});
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
    RowShape row;
    Pages cache;
    RowsView log;
    const int64_t* slot_mapping;
    const int32_t* log_rows;
    int64_t num_tokens;
    Limits limits;
    RowWindows row_windows;
};

template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) log_kernel(const __grid_constant__ LogJob job) {
    const Place place = place_of_thread();
    const int64_t first = row_of_thread(), step = static_cast<int64_t>(gridDim.x) * blockDim.z;
    wait_for_earlier_kernels();
    if (!job.row.has(place)) return;
    const bool marks = marks_row(job.row_windows, place);
    const int64_t window = marks ? *job.row_windows.window_id : 0;
    Destination to[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i)
        to[i] = first + i * step < job.num_tokens
                    ? destination(job.slot_mapping, job.log_rows, first + i * step)
                    : Destination{-1, -1};

    Unit old[kRowsPerThread];
    bool logged[kRowsPerThread];
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        to[i] = checked(to[i], first + i * step, job.limits);
        logged[i] = false;
        if (to[i].slot < 0 || to[i].log_row < 0) continue;
        const int64_t from = Slot<kTable>(job.limits.slots, to[i].slot).offset(job.cache, place);
        logged[i] = within<kTable>(job.cache, from, job.limits.report_as);
        if (logged[i]) old[i] = reinterpret_cast<const Unit*>(job.cache.data)[from];
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        if (!logged[i]) continue;
        reinterpret_cast<Unit*>(job.log.data)[offset_in(job.log, to[i].log_row, place)] = old[i];
        if (marks) job.row_windows.rows[to[i].log_row] = window;
    }
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
    const LogJob job{RowShape(l.op, l.cache, elements),
                     in_units(l.cache, elements, l.page_offsets),
                     in_units(l.log, elements),
                     l.slot_mapping,
                     l.log_rows,
                     l.num_tokens,
                     {slots_of(l.cache), l.num_log_rows, report_as(l.op)},
                     l.row_windows};
    const LaunchShape shape =
        shape_for_rows(l.op, ceil_div(l.num_tokens, kRowsPerThread), job.row.num_heads, job.row.columns);
    if (table)
        with_raw_type(l.cache.element_size, [&](auto tag) {
            launch.start(log_kernel<typename decltype(tag)::type, true>, shape, job);
        });
    else
        with_access_type(elements * size, [&](auto tag) {
            launch.start(log_kernel<typename decltype(tag)::type, false>, shape, job);
        });
    check_launch(launch, complain);
}

// ---------------------------------------------------------------- restore_slots

struct RestoreJob {
    RowShape row;
    Slots slots;
    Pages pages;   // of every layer; `data` is not used
    RowsView log;  // of the first layer of this launch
    int64_t log_layer_stride;
    int num_layers;
    int64_t num_rows;
    FastDivisor by_num_rows;
    const int64_t* row_slots;
    const bool* row_rejected;
    RowWindows row_windows;  // from the first layer of this launch on
    const char* report_as;
    char* caches[kLayersPerLaunch];
};
static_assert(sizeof(RestoreJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

// Which of a thread's layers logged the row in this window, one bit each.
__device__ unsigned layers_to_restore(const RestoreJob& job, int first_layer, int64_t row) {
    const int layers = min(kLayersPerThread, job.num_layers - first_layer);
    if (job.row_windows.rows == nullptr) return (1u << layers) - 1;
    const int64_t window = *job.row_windows.window_id;
    unsigned logged = 0;
#pragma unroll
    for (int i = 0; i < kLayersPerThread; ++i)
        if (i < layers && job.row_windows.rows[(first_layer + i) * job.num_rows + row] == window)
            logged |= 1u << i;
    return logged;
}

// The rows of this launch are those of the log, once for each group of layers that share a thread. The last
// layers come first: what was written last is still in the L2 cache.
template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) restore_kernel(const __grid_constant__ RestoreJob job) {
    const Place place = place_of_thread();
    const uint32_t row_of_launch = static_cast<uint32_t>(row_of_thread());
    const uint32_t layer_group = job.by_num_rows.quotient(row_of_launch);
    const int64_t row = row_of_launch - layer_group * job.by_num_rows.divisor;
    const int last_group = (job.num_layers - 1) / kLayersPerThread;
    const int first_layer = (last_group - static_cast<int>(layer_group)) * kLayersPerThread;
    wait_for_earlier_kernels();
    if (first_layer < 0 || !job.row.has(place)) return;
    // All of these are loaded before the first is judged.
    const bool rejected = job.row_rejected[row];
    const int64_t slot_number = job.row_slots[row];
    const unsigned layers = layers_to_restore(job, first_layer, row);
    if (!rejected || slot_number < 0 || layers == 0) return;
    if (slot_number >= job.slots.count)
        return report(job.report_as, kRowSlots, row, slot_number, job.slots.count);

    const Unit* log = reinterpret_cast<const Unit*>(job.log.data) + first_layer * job.log_layer_stride +
                      offset_in(job.log, row, place);
    const int64_t to = Slot<kTable>(job.slots, slot_number).offset(job.pages, place);
    if (!within<kTable>(job.pages, to, job.report_as)) return;
    Unit saved[kLayersPerThread];
#pragma unroll
    for (int i = 0; i < kLayersPerThread; ++i)
        if (layers >> i & 1) saved[i] = log[i * job.log_layer_stride];
#pragma unroll
    for (int i = 0; i < kLayersPerThread; ++i)
        if (layers >> i & 1) reinterpret_cast<Unit*>(job.caches[first_layer + i])[to] = saved[i];
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
    job.row = RowShape(r.op, r.cache, elements);
    job.slots = slots_of(r.cache);
    job.pages = in_units(r.cache, elements, r.page_offsets);
    job.log = in_units(r.log, elements);
    job.log.data += first * r.log_layer_stride * r.cache.element_size;
    job.log_layer_stride = r.log_layer_stride / elements;
    job.num_layers = static_cast<int>(count);
    job.num_rows = r.num_rows;
    job.by_num_rows = FastDivisor(r.num_rows);
    job.row_slots = r.row_slots;
    job.row_rejected = r.row_rejected;
    job.row_windows = r.row_windows;
    if (r.row_windows.rows != nullptr) job.row_windows.rows += first * r.num_rows;
    job.report_as = report_as(r.op);
    const LaunchShape shape = shape_for_rows(r.op, r.num_rows * ceil_div(count, kLayersPerThread),
                                             job.row.num_heads, job.row.columns);
    if (r.page_offsets.table != nullptr)
        with_raw_type(r.cache.element_size, [&](auto tag) {
            launch.start(restore_kernel<typename decltype(tag)::type, true>, shape, job);
        });
    else
        with_access_type(elements * r.cache.element_size, [&](auto tag) {
            launch.start(restore_kernel<typename decltype(tag)::type, false>, shape, job);
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
