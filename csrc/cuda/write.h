// The writer of keys and values, for all ops that write them: plain, with a log, or only accepted rows.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include "../common/write.h"
#include "rows.h"

namespace nwor {
namespace {

constexpr int kPlanes = 2;  // key and value

// Extra work of a writer: nothing, log the old bytes of drafts, or skip rows that were not
// accepted.
enum class Writer { kPlain, kLogged, kAccepted };

// ---------------------------------------------------------------- the slot of a token

// The slot of a token (negative if it is skipped) and its log row (negative if it is not logged).
struct Destination {
    int64_t slot, log_row;
};

struct Limits {
    Slots slots;
    int64_t num_log_rows;
    const char* report_as;
};

// Loading is separate from checking, so that a thread's other loads overlap with it.
__device__ Destination destination(const int64_t* slot_mapping, const int32_t* log_rows, int64_t token) {
    return {slot_mapping[token], log_rows == nullptr ? -1 : log_rows[token]};
}

// Reports an invalid slot or log row, and sets it to -1.
__device__ Destination checked(Destination to, int64_t token, const Limits& limits,
                               Problem of_slot = kSlotMapping) {
    if (to.slot >= limits.slots.count) {
        report(limits.report_as, {of_slot, token, to.slot, limits.slots.count});
        to.slot = -1;
    }
    if (to.slot >= 0 && to.log_row >= limits.num_log_rows) {
        report(limits.report_as, {kLogRows, token, to.log_row, limits.num_log_rows});
        to.log_row = -1;
    }
    return to;
}

// Whether this thread must write the row's window number.
__device__ bool marks_row(const RowWindows& row_windows, const Place& place) {
    return row_windows.rows != nullptr && place.leads_row();
}

// ---------------------------------------------------------------- from a source to a cache

// `Copy` and `Quantize` convert one unit of the source to one unit of the cache. `Copy` copies bytes.
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

// Converts to 8-bit floats as vLLM's fp8::scaled_convert: a division, then a saturating conversion. (One
// reciprocal with exact corrections instead of the divisions was slower, except for a few tokens.)
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
    Acceptance accepted;
    int64_t num_tokens;
    Limits limits;
    RowWindows row_windows;
    Format format;
};

// Grid: `shape_for_rows` over tokens x heads x accesses. A thread moves the same element of key and value. In
// a packed row they are adjacent.
template <class Access, Writer kWriter>
__global__ void __launch_bounds__(kThreads) write_kernel(const __grid_constant__ WriteJob job) {
    using Source = typename Access::Source;
    using Cache = typename Access::Cache;
    constexpr bool kLogged = kWriter == Writer::kLogged, kAccepted = kWriter == Writer::kAccepted;
    const int64_t token = row_of_thread();
    const Place place = place_of_thread();
    const bool has[kPlanes] = {job.planes[0].row.has(place), job.planes[1].row.has(place)};
    wait_for_earlier_kernels();
    if (token >= job.num_tokens) return;
    const Destination wanted = destination(job.slot_mapping, kLogged ? job.log_rows : nullptr, token);
    const bool accepted = !kAccepted || job.accepted.accepts(token);
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

    if (!accepted) return;
    const Destination to = checked(wanted, token, job.limits, kAccepted ? kRowSlots : kSlotMapping);
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
    let_next_kernel_in();  // the rest of the work waits for the old bytes
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

template <Writer kWriter, class Access>
void launch_write(const WriteArguments& w, int64_t elements, const Launch& launch) {
    const WriteJob job{{write_plane(w.op, w.key, w.key_cache, w.key_log, w.k_scale, elements),
                        write_plane(w.op, w.value, w.value_cache, w.value_log, w.v_scale, elements)},
                       w.slot_mapping,
                       w.log_rows,
                       w.accepted,
                       w.num_tokens,
                       {slots_of(w.key_cache), w.num_log_rows, report_as(w.op)},
                       w.row_windows,
                       w.format};
    const RowShape &key = job.planes[0].row, &value = job.planes[1].row;
    launch.start(write_kernel<Access, kWriter>,
                 shape_for_rows(w.op, w.num_tokens, key.num_heads, std::max(key.columns, value.columns)),
                 job);
}

template <Writer kWriter, class T>
void launch_quantized(const WriteArguments& w, int64_t elements, const Launch& launch) {
    if constexpr (sizeof(T) == 2)
        if (elements == 8) return launch_write<kWriter, Quantize<T, 8>>(w, elements, launch);
    switch (elements) {
        case 4:
            return launch_write<kWriter, Quantize<T, 4>>(w, elements, launch);
        case 2:
            return launch_write<kWriter, Quantize<T, 2>>(w, elements, launch);
        default:
            return launch_write<kWriter, Quantize<T, 1>>(w, elements, launch);
    }
}

bool plane_fits(const RowsView& source, int64_t source_size, const CacheView& cache, const RowsView* log,
                int64_t elements) {
    if (cache.width == 0) return true;
    return fits(cache, elements) && fits(source, cache, source_size, elements) &&
           (log == nullptr || fits(*log, cache, cache.element_size, elements));
}

template <Writer kWriter>
void write(const WriteArguments& w, const Launch& launch) {
    if (w.num_tokens == 0) return;
    constexpr bool logged = kWriter == Writer::kLogged;
    const int64_t source_size = w.source_dtype == ScalarType::Float ? 4 : 2;
    const int64_t elements = elements_per_access(source_size, [&](int64_t n) {
        return plane_fits(w.key, source_size, w.key_cache, logged ? &w.key_log : nullptr, n) &&
               plane_fits(w.value, source_size, w.value_cache, logged ? &w.value_log : nullptr, n);
    });
    if (w.format == Format::kCopy)
        with_access_type(elements * source_size, [&](auto tag) {
            launch_write<kWriter, Copy<typename decltype(tag)::type>>(w, elements, launch);
        });
    else if (w.source_dtype == ScalarType::Float)
        launch_quantized<kWriter, float>(w, elements, launch);
    else if (w.source_dtype == ScalarType::Half)
        launch_quantized<kWriter, __half>(w, elements, launch);
    else
        launch_quantized<kWriter, __nv_bfloat16>(w, elements, launch);
    check_launch(launch);
}

}  // namespace

}  // namespace nwor
