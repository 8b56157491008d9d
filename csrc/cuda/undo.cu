// Family undo on CUDA: write, write with a log, log, restore. Semantics: nwor_ops/ops/undo.py.
#include "../undo.h"
#include "acceptance.h"
#include "write.h"

namespace nwor {
namespace {

constexpr int kRowsPerThread = 2;  // log: rows whose loads overlap
// Number of base addresses that fit in a launch's parameters (4 KB). More layers take another launch.
constexpr int64_t kLayersPerLaunch = 384;

// ---------------------------------------------------------------- write_kv, write_kv_logged

void run(const WriteArguments& w, const Launch& launch) {
    if (w.log_rows == nullptr)
        write<Writer::kPlain>(w, launch);
    else
        write<Writer::kLogged>(w, launch);
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

// Grid: `shape_for_rows` over tokens x heads x accesses. A thread logs the same access of kRowsPerThread
// tokens.
template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) log_kernel(const __grid_constant__ LogJob job) {
    const Place place = place_of_thread();
    const int64_t first = row_of_thread(), step = static_cast<int64_t>(gridDim.x) * blockDim.z;
    wait_for_earlier_kernels();
    const bool has = job.row.has(place);
    if (!has && !place.leads_row()) return;
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
        logged[i] = true;
        if (!has) continue;
        const int64_t from = Slot<kTable>(job.limits.slots, to[i].slot).offset(job.cache, place);
        logged[i] = within<kTable>(job.cache, from, job.limits.report_as);
        if (logged[i]) old[i] = reinterpret_cast<const Unit*>(job.cache.data)[from];
    }
#pragma unroll
    for (int i = 0; i < kRowsPerThread; ++i) {
        if (!logged[i]) continue;
        if (has) reinterpret_cast<Unit*>(job.log.data)[offset_in(job.log, to[i].log_row, place)] = old[i];
        if (marks) job.row_windows.rows[to[i].log_row] = window;
    }
}

void run(const LogArguments& l, const Launch& launch) {
    if (l.num_tokens == 0) return;
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
    check_launch(launch);
}

// ---------------------------------------------------------------- restore_slots

struct RestoreJob {
    RowShape row;
    Slots slots;
    Pages pages;   // layout of every layer; `data` is not used
    RowsView log;  // log of the first layer of this launch
    int64_t log_layer_stride;
    int num_layers;
    int64_t windows_layer_stride;
    FastDivisor by_num_rows;
    const int64_t* row_slots;
    const bool* row_rejected;
    RowWindows row_windows;  // from the first layer of this launch on
    const char* report_as;
    AcceptJob acceptance;    // for a launch that also determines outcomes
    uint32_t accept_blocks;  // number of blocks that determine outcomes; they come first
    char* caches[kLayersPerLaunch];
};
static_assert(sizeof(RestoreJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

// The layers of this thread that logged the row in this window, one bit each.
__device__ unsigned layers_to_restore(const RestoreJob& job, int first_layer, int64_t row) {
    const int layers = min(kLayersPerThread, job.num_layers - first_layer);
    if (job.row_windows.rows == nullptr) return (1u << layers) - 1;
    const int64_t window = *job.row_windows.window_id;
    unsigned logged = 0;
#pragma unroll
    for (int i = 0; i < kLayersPerThread; ++i)
        if (i < layers && job.row_windows.rows[(first_layer + i) * job.windows_layer_stride + row] == window)
            logged |= 1u << i;
    return logged;
}

// Grid: with kAccepts, first `accept_blocks` blocks (in x) that store the outcomes. Then `shape_for_rows`
// over rows x heads x accesses. The rows of this launch are the rows of the log, repeated for each group of
// layers that share a thread. The last layers come first, because the most recent writes are still in the L2
// cache. With kAccepts, every thread determines the outcome of its row, and no block waits for those that
// store the outcomes.
template <class Unit, bool kTable, bool kAccepts>
__global__ void __launch_bounds__(kThreads) restore_kernel(const __grid_constant__ RestoreJob job) {
    const Place place = place_of_thread();
    const uint32_t row_of_launch = (blockIdx.x - job.accept_blocks) * blockDim.z + threadIdx.z;
    const uint32_t layer_group = job.by_num_rows.quotient(row_of_launch);
    const int64_t row = row_of_launch - layer_group * job.by_num_rows.divisor;
    const int last_group = (job.num_layers - 1) / kLayersPerThread;
    const int first_layer = (last_group - static_cast<int>(layer_group)) * kLayersPerThread;
    wait_for_earlier_kernels();
    if constexpr (kAccepts) {
        fetch_requests(job.acceptance.accept);
        if (blockIdx.x < job.accept_blocks) {
            if (blockIdx.y == 0 && blockIdx.z == 0) accept_items(job.acceptance, blockIdx.x);
            return;
        }
    }
    const bool has = job.row.has(place);
    if (first_layer < 0 || !(has || place.leads_row())) return;
    // All of these are loaded before the first one is used.
    const int64_t slot_number = job.row_slots[row];
    const unsigned layers = layers_to_restore(job, first_layer, row);
    const bool rejected = kAccepts ? was_rejected(job.acceptance.accept, row) : job.row_rejected[row];
    if (!rejected || slot_number < 0 || layers == 0) return;
    if (slot_number >= job.slots.count)
        return report(job.report_as, {kRowSlots, row, slot_number, job.slots.count});
    if (!has) return;

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

bool layers_fit(const RestoreArguments& r, int64_t elements) {
    const CacheView& cache = r.planes.view;
    if (r.planes.count() > 1 && r.log_layer_stride % elements != 0) return false;
    if (!fits(r.log, cache, cache.element_size, elements)) return false;
    return planes_fit(r.planes, elements);
}

// One launch for the layers [first, first + count). With kAccepts, the first launch also determines the
// outcome of drafts.
template <bool kAccepts>
void launch_restore(const RestoreArguments& r, const AcceptArguments& accept, int64_t first, int64_t count,
                    int64_t elements, const Launch& launch) {
    RestoreJob job{};
    const CacheView& cache = r.planes.view;
    std::copy_n(r.planes.data.begin() + first, count, job.caches);
    job.row = RowShape(r.op, cache, elements);
    job.slots = slots_of(cache);
    job.pages = in_units(cache, elements, r.page_offsets);
    job.log = in_units(r.log, elements);
    job.log.data += first * r.log_layer_stride * cache.element_size;
    job.log_layer_stride = r.log_layer_stride / elements;
    job.num_layers = static_cast<int>(count);
    job.windows_layer_stride = r.windows_layer_stride;
    job.by_num_rows = FastDivisor(r.num_rows);
    job.row_slots = r.row_slots;
    job.row_rejected = r.row_rejected;
    job.row_windows = r.row_windows;
    if (r.row_windows.rows != nullptr) job.row_windows.rows += first * r.windows_layer_stride;
    job.report_as = report_as(r.op);
    LaunchShape shape = shape_for_rows(r.op, r.num_rows * ceil_div(count, kLayersPerThread),
                                       job.row.num_heads, job.row.columns);
    if constexpr (kAccepts) {
        job.acceptance = {accept, report_as(r.op)};
        const int64_t threads = shape.block.x * shape.block.y * shape.block.z;
        if (first == 0) job.accept_blocks = static_cast<uint32_t>(ceil_div(items_to_accept(accept), threads));
        shape.grid.x += job.accept_blocks;
    }
    if (shape.grid.x == 0) return;
    if (r.page_offsets.table != nullptr)
        with_raw_type(cache.element_size, [&](auto tag) {
            launch.start(restore_kernel<typename decltype(tag)::type, true, kAccepts>, shape, job);
        });
    else
        with_access_type(elements * cache.element_size, [&](auto tag) {
            launch.start(restore_kernel<typename decltype(tag)::type, false, kAccepts>, shape, job);
        });
}

template <bool kAccepts>
void restore(const RestoreArguments& r, const AcceptArguments& accept, const Launch& launch) {
    const int64_t elements = elements_per_access(r.planes.view.element_size, [&](int64_t n) {
        return r.page_offsets.table == nullptr && layers_fit(r, n);
    });
    for (int64_t first = 0; first < r.planes.count(); first += kLayersPerLaunch)
        launch_restore<kAccepts>(r, accept, first, std::min(kLayersPerLaunch, r.planes.count() - first),
                                 elements, launch);
    check_launch(launch);
}

void run(const RestoreArguments& r, const Launch& launch) {
    restore<false>(r, {}, launch);
}

void run(const RestoreCall& call, const Launch& launch) {
    restore<true>(call.restore, call.accept, launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_undo<Launch>(m);
}

}  // namespace nwor
