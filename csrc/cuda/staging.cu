// Family staging on CUDA: the staging buffer, and moves. Semantics: nwor_ops/ops/staging.py.
#include "../staging.h"
#include "write.h"

namespace nwor {
namespace {

// ---------------------------------------------------------------- stage_kv

struct StageJob {
    RowShape rows[kPlanes];
    RowsView sources[kPlanes], staged[kPlanes];
    const int32_t* stage_rows;
    int64_t num_tokens, num_rows;
    RowWindows row_windows;
    const char* report_as;
};

// Grid: `shape_for_rows` over tokens x heads x accesses. A thread moves the same element of key and value.
template <class Unit>
__global__ void __launch_bounds__(kThreads) stage_kernel(const __grid_constant__ StageJob job) {
    const int64_t token = row_of_thread();
    const Place place = place_of_thread();
    const bool has[kPlanes] = {job.rows[0].has(place), job.rows[1].has(place)};
    wait_for_earlier_kernels();
    if (token >= job.num_tokens) return;
    const int64_t row = job.stage_rows[token];
    const bool marks = marks_row(job.row_windows, place);
    const int64_t window = marks ? *job.row_windows.window_id : 0;
    Unit fresh[kPlanes];
#pragma unroll
    for (int i = 0; i < kPlanes; ++i)
        if (has[i])
            fresh[i] =
                reinterpret_cast<const Unit*>(job.sources[i].data)[offset_in(job.sources[i], token, place)];
    if (row < 0) return;
    if (row >= job.num_rows) return report(job.report_as, {kStageRows, token, row, job.num_rows});
#pragma unroll
    for (int i = 0; i < kPlanes; ++i)
        if (has[i])
            reinterpret_cast<Unit*>(job.staged[i].data)[offset_in(job.staged[i], row, place)] = fresh[i];
    if (marks) job.row_windows.rows[row] = window;
}

bool rows_fit(const StageArguments& a, int64_t elements) {
    for (int i = 0; i < kPlanes; ++i) {
        const CacheView& shape = a.shapes[i];
        if (shape.width % elements != 0 || !fits(a.sources[i], shape, shape.element_size, elements) ||
            !fits(a.staged[i], shape, shape.element_size, elements))
            return false;
    }
    return true;
}

void run(const StageArguments& a, const Launch& launch) {
    if (a.num_tokens == 0) return;
    const int64_t size = a.shapes[0].element_size;
    const int64_t elements = elements_per_access(size, [&](int64_t n) { return rows_fit(a, n); });
    StageJob job{};
    for (int i = 0; i < kPlanes; ++i) {
        job.rows[i] = RowShape(a.op, a.shapes[i], elements);
        job.sources[i] = in_units(a.sources[i], elements);
        job.staged[i] = in_units(a.staged[i], elements);
    }
    job.stage_rows = a.stage_rows;
    job.num_tokens = a.num_tokens;
    job.num_rows = a.num_rows;
    job.row_windows = a.row_windows;
    job.report_as = report_as(a.op);
    const LaunchShape shape = shape_for_rows(a.op, a.num_tokens, job.rows[0].num_heads,
                                             std::max(job.rows[0].columns, job.rows[1].columns));
    with_access_type(elements * size,
                     [&](auto tag) { launch.start(stage_kernel<typename decltype(tag)::type>, shape, job); });
    check_launch(launch);
}

// ---------------------------------------------------------------- accept_staged, commit_staged

constexpr int kAcceptThreads = 1024;

// Grid: one block of 1024 threads, because one missing row decides for all rows.
__global__ void __launch_bounds__(kAcceptThreads)
    accept_staged_kernel(const __grid_constant__ AcceptStagedArguments a) {
    __shared__ unsigned long long counts[3];  // staged, operations, committed
    wait_for_earlier_kernels();
    if (threadIdx.x < 3) counts[threadIdx.x] = 0;
    __syncthreads();
    const int64_t window = *a.windows.window_id;
    unsigned long long staged = 0, operations = 0, committed = 0;
    bool missing = false;
    for (int64_t row = threadIdx.x; row < a.num_rows; row += kAcceptThreads) {
        const int64_t layers = a.layers_of(row, window);
        staged += layers > 0;
        operations += layers;
        missing = missing || (a.wanted(row) && !a.possible(row, layers));
    }
    const bool complete = !__syncthreads_or(missing);
    for (int64_t row = threadIdx.x; row < a.num_rows; row += kAcceptThreads) {
        const bool commits = complete && a.wanted(row);
        a.row_committed[row] = commits;
        committed += commits;
    }
    if (staged > 0) atomicAdd(&counts[0], staged);
    if (operations > 0) atomicAdd(&counts[1], operations);
    if (committed > 0) atomicAdd(&counts[2], committed);
    __syncthreads();
    if (threadIdx.x > 0) return;
    a.counters[kStageWindows] += 1;
    a.counters[kStageStaged] += static_cast<int64_t>(counts[0]);
    a.counters[kStageOperations] += static_cast<int64_t>(counts[1]);
    a.counters[kStageCommitted] += static_cast<int64_t>(counts[2]);
    a.counters[kStageRejected] += static_cast<int64_t>(counts[0]) - static_cast<int64_t>(counts[2]);
    a.counters[kStageIncomplete] += !complete;
}

void run(const AcceptStagedArguments& a, const Launch& launch) {
    launch.start(accept_staged_kernel, {dim3(1), dim3(kAcceptThreads)}, a);
    check_launch(launch);
}

void run(const WriteArguments& w, const Launch& launch) {
    write<Writer::kAccepted>(w, launch);
}

// ---------------------------------------------------------------- move_slots

constexpr int64_t kPlanesPerMove = 384;  // addresses that fit in a launch's parameters (4 KB)
// Shared memory per block. With the 1 KiB that CUDA reserves per block, six blocks fit on a multiprocessor of
// an H100.
constexpr int64_t kMoveTileBytes = 32 << 10;
constexpr int64_t kSharedWithoutAsking = 48 << 10;
constexpr int kMovesPerThread = 4;  // moves whose loads overlap

struct MoveJob {
    RowShape row;
    Slots slots;
    Pages pages;
    int64_t num_moves;
    const int64_t *from, *to;
    const char* report_as;
    char* caches[kPlanesPerMove];
};
static_assert(sizeof(MoveJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

// Offsets at which one access of a move reads and writes; negative for a move that is skipped.
struct MoveOffsets {
    int64_t from, to;
};

template <bool kTable>
__device__ MoveOffsets offsets_of(const MoveJob& job, int64_t move, const Place& place) {
    if (move >= job.num_moves) return {-1, -1};
    const int64_t from = job.from[move], to = job.to[move];
    if (from < 0 || to < 0) return {-1, -1};
    if (from >= job.slots.count || to >= job.slots.count) {
        const bool source = from >= job.slots.count;
        report(job.report_as, {source ? kSrcSlots : kDstSlots, move, source ? from : to, job.slots.count});
        return {-1, -1};
    }
    if (from == to) return {-1, -1};
    const MoveOffsets offsets{Slot<kTable>(job.slots, from).offset(job.pages, place),
                              Slot<kTable>(job.slots, to).offset(job.pages, place)};
    if (!within<kTable>(job.pages, offsets.from, job.report_as) ||
        !within<kTable>(job.pages, offsets.to, job.report_as))
        return {-1, -1};
    return offsets;
}

// Grid: x = tiles of columns, y = heads, z = planes. A block handles some columns of one head of one plane,
// in all moves. It reads every source into shared memory before it writes the first destination, and no other
// block touches those columns.
template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) move_kernel(const __grid_constant__ MoveJob job) {
    extern __shared__ uint4 shared[];
    Unit* rows = reinterpret_cast<Unit*>(shared) + threadIdx.x;
    const Place place{blockIdx.y, blockIdx.x * blockDim.x + threadIdx.x};
    const bool has = job.row.has(place);
    const int64_t step = blockDim.y;
    wait_for_earlier_kernels();
    Unit* cache = reinterpret_cast<Unit*>(job.caches[blockIdx.z]);
    for (int64_t first = threadIdx.y; has && first < job.num_moves; first += step * kMovesPerThread) {
        Unit loaded[kMovesPerThread];
        bool moved[kMovesPerThread];
#pragma unroll
        for (int i = 0; i < kMovesPerThread; ++i) {
            const MoveOffsets offsets = offsets_of<kTable>(job, first + i * step, place);
            moved[i] = offsets.from >= 0;
            if (moved[i]) loaded[i] = cache[offsets.from];
        }
#pragma unroll
        for (int i = 0; i < kMovesPerThread; ++i)
            if (moved[i]) rows[(first + i * step) * blockDim.x] = loaded[i];
    }
    __syncthreads();
    for (int64_t move = threadIdx.y; has && move < job.num_moves; move += step) {
        const MoveOffsets offsets = offsets_of<kTable>(job, move, place);
        if (offsets.to >= 0) cache[offsets.to] = rows[move * blockDim.x];
    }
}

// Computes how many columns a block handles, and the launch shape.
LaunchShape shape_for_moves(const MoveJob& job, int64_t unit, int64_t planes) {
    int64_t x = 1;
    while (x < kWarp && x < job.row.columns) x *= 2;
    while (x > 1 && x * unit * job.num_moves > kMoveTileBytes) x /= 2;
    const int64_t y = std::min<int64_t>(kThreads / x, std::max<int64_t>(job.num_moves, 1));
    const auto size = [](int64_t n) { return static_cast<unsigned>(n); };
    return {dim3(size(ceil_div(job.row.columns, x)), job.row.num_heads, size(planes)), dim3(size(x), size(y)),
            static_cast<size_t>(x * unit * job.num_moves)};
}

int64_t shared_bytes_of_device(int32_t device) {
    int bytes = 0;
    STD_CUDA_CHECK(cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
    return bytes;
}

template <class Unit, bool kTable>
void launch_moves(const MoveArguments& m, int64_t elements, const Launch& launch) {
    const auto kernel = move_kernel<Unit, kTable>;
    const CacheView& cache = m.planes.view;
    for (int64_t first = 0; first < m.planes.count(); first += kPlanesPerMove) {
        const int64_t planes = std::min(kPlanesPerMove, m.planes.count() - first);
        MoveJob job{};
        std::copy_n(m.planes.data.begin() + first, planes, job.caches);
        job.row = RowShape(m.op, cache, elements);
        job.slots = slots_of(cache);
        job.pages = in_units(cache, elements, m.page_offsets);
        job.num_moves = m.num_moves;
        job.from = m.from;
        job.to = m.to;
        job.report_as = report_as(m.op);
        const LaunchShape shape = shape_for_moves(job, sizeof(Unit), planes);
        if (shape.grid.y > kMostGridYZ) fail(m.op, "caches must have at most ", kMostGridYZ, " heads");
        if (shape.shared_bytes > kSharedWithoutAsking)
            STD_CUDA_CHECK(cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel),
                                                cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                static_cast<int>(shape.shared_bytes)));
        launch.start(kernel, shape, job);
    }
}

void run(const MoveArguments& m, const Launch& launch) {
    const CacheView& cache = m.planes.view;
    if (m.num_moves == 0 || cache.num_heads * cache.width == 0) return;
    const int64_t size = cache.element_size, room = shared_bytes_of_device(launch.device());
    if (m.num_moves * size > room)
        fail(m.op, "src_slots must hold at most ", room / size, " moves for this device and dtype, got ",
             m.num_moves);
    const bool table = m.page_offsets.table != nullptr;
    const int64_t elements = elements_per_access(
        size, [&](int64_t n) { return !table && n * size * m.num_moves <= room && planes_fit(m.planes, n); });
    if (table)
        with_raw_type(cache.element_size, [&](auto tag) {
            launch_moves<typename decltype(tag)::type, true>(m, elements, launch);
        });
    else
        with_access_type(elements * size, [&](auto tag) {
            launch_moves<typename decltype(tag)::type, false>(m, elements, launch);
        });
    check_launch(launch);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_staging<Launch>(m);
}

}  // namespace nwor
