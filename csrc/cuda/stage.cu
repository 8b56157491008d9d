// Family stage on CUDA: a staging buffer, moves, shadow pages. Semantics: nwor_ops/ops_stage.py.
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

// A thread moves the same place of key and value.
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
    if (row >= job.num_rows) return report(job.report_as, kStageRows, token, row, job.num_rows);
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

void stage_kv(const Tensor& key, const Tensor& value, const Tensor& stage_rows, const Tensor& staged_key,
              const Tensor& staged_value, const std::optional<Tensor>& window_id,
              const std::optional<Tensor>& row_windows) {
    const StageArguments a =
        check_stage(key, value, stage_rows, staged_key, staged_value, window_id, row_windows);
    if (a.num_tokens == 0) return;
    const Launch launch(key);
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
    const LaunchShape shape = shape_for_rows(a.op, a.num_tokens, std::max<int64_t>(job.rows[0].num_heads, 1),
                                             std::max(job.rows[0].columns, job.rows[1].columns));
    with_access_type(elements * size,
                     [&](auto tag) { launch.start(stage_kernel<typename decltype(tag)::type>, shape, job); });
    check_launch(launch, complain);
}

// ---------------------------------------------------------------- accept_staged, commit_staged

constexpr int kAcceptThreads = 1024;

// One block: whether any row is missing anywhere decides about all rows.
__global__ void __launch_bounds__(kAcceptThreads)
    accept_staged_kernel(const __grid_constant__ AcceptStagedArguments a) {
    __shared__ unsigned long long counts[3];  // staged, operations, committed
    wait_for_earlier_kernels();
    if (threadIdx.x < 3) counts[threadIdx.x] = 0;
    __syncthreads();
    const int64_t window = *a.window_id;
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

void accept_staged(const Tensor& row_accepted, const Tensor& row_slots, const Tensor& window_id,
                   const Tensor& row_windows, int64_t num_slots, const Tensor& row_committed,
                   const Tensor& counters, const std::optional<Tensor>& row_requests,
                   const std::optional<Tensor>& row_positions) {
    const AcceptStagedArguments a =
        check_accept_staged(row_accepted, row_slots, window_id, row_windows, num_slots, row_committed,
                            counters, row_requests, row_positions);
    const Launch launch(counters);
    launch.start(accept_staged_kernel, {dim3(1), dim3(kAcceptThreads)}, a);
    check_launch(launch, complain);
}

void commit_staged(const Tensor& staged_key, const Tensor& staged_value, const Tensor& row_slots,
                   const Tensor& row_accepted, const Tensor& key_cache, const Tensor& value_cache,
                   const Tensor& k_scale, const Tensor& v_scale, const std::string& kv_cache_dtype,
                   const std::optional<Tensor>& row_requests, const std::optional<Tensor>& row_positions) {
    write<Writer::kAccepted>(
        check_commit(staged_key, staged_value, row_slots, row_accepted, key_cache, value_cache, k_scale,
                     v_scale, kv_cache_dtype, row_requests, row_positions),
        key_cache);
}

// ---------------------------------------------------------------- move_slots

constexpr int64_t kPlanesPerMove = 384;       // addresses that fit in a launch's parameters (4 KB in all)
constexpr int64_t kMoveTileBytes = 32 << 10;  // of shared memory: seven blocks fit on a multiprocessor
constexpr int64_t kSharedWithoutAsking = 48 << 10;
constexpr int kMovesPerThread = 4;  // whose loads overlap

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

// Where one access of a move reads and writes; less than 0 for a move that is left out.
struct MoveOffsets {
    int64_t from, to;
};

template <bool kTable>
__device__ MoveOffsets offsets_of(const MoveJob& job, int64_t move, const Place& place) {
    if (move >= job.num_moves) return {-1, -1};
    const int64_t from = job.from[move], to = job.to[move];
    if (from < 0 || to < 0 || from == to) return {-1, -1};
    if (from >= job.slots.count || to >= job.slots.count) {
        const bool source = from >= job.slots.count;
        report(job.report_as, source ? kSrcSlots : kDstSlots, move, source ? from : to, job.slots.count);
        return {-1, -1};
    }
    const MoveOffsets offsets{Slot<kTable>(job.slots, from).offset(job.pages, place),
                              Slot<kTable>(job.slots, to).offset(job.pages, place)};
    if (!within<kTable>(job.pages, offsets.from, job.report_as) ||
        !within<kTable>(job.pages, offsets.to, job.report_as))
        return {-1, -1};
    return offsets;
}

// A block owns some columns of one head of one plane, in all moves: it reads every source into shared memory
// before it writes the first destination, and no other block touches those columns.
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

// How many columns a block takes, and the shape that follows.
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

void move_slots(const std::vector<Tensor>& caches, const Tensor& src_slots, const Tensor& dst_slots,
                const std::optional<Tensor>& page_offsets) {
    const MoveArguments m = check_move(caches, src_slots, dst_slots, page_offsets);
    const CacheView& cache = m.planes.view;
    if (m.num_moves == 0 || cache.num_heads * cache.width == 0) return;
    const Launch launch(caches[0]);
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
    check_launch(launch, complain);
}

// ---------------------------------------------------------------- open_window, close_window

constexpr int kTokensAtOnce = 8;           // of a request, that threads redirect side by side
constexpr int64_t kMostTokensAtOnce = 16;  // and that they copy
// Rows of a request that copy at the same time: as many as give every multiprocessor some blocks. A larger
// grid only makes more blocks that find no row; threads that copy more than a few rows, one after another,
// are slower again.
constexpr int64_t kBlocksOfCopies = 4 * kEnoughBlocks;
constexpr int64_t kFewestRowsAtOnce = 3;
constexpr int64_t kPlanesPerWindow = 320;
constexpr int64_t kMostRuns = kPlanesPerWindow / kLayersPerThread + kMostWindowGroups;

// Planes that one thread takes together: of one group, so that they share slots.
struct PlaneRun {
    uint16_t first;
    uint8_t count, group;
};

struct WindowJob {
    WindowArguments window;
    RowShape row;
    Pages pages;  // of every plane; `data` is not used
    uint32_t copy_blocks, rows_at_once;
    FastDivisor by_run, by_request;  // of a row of the launch
    uint32_t num_runs;
    const char* report_as;
    JudgeJob judge;        // of a launch that judges
    uint32_t first_judge;  // block; those before it copy and redirect
    PlaneRun runs[kMostRuns];
    char* caches[kPlanesPerWindow];
};
static_assert(sizeof(WindowJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

// What a thread of the copying blocks does: every `rows_at_once`-th row of one request in one run of planes.
struct CopyTask {
    PlaneRun run;
    int64_t request, first;
    bool any;

    __device__ explicit CopyTask(const WindowJob& job) : run{}, request(0), first(0), any(false) {
        const uint32_t row = static_cast<uint32_t>(row_of_thread());
        const uint32_t number = job.by_run.quotient(row);
        if (number >= job.num_runs) return;
        const uint32_t rest = row - number * job.by_run.divisor;
        run = job.runs[number];
        request = job.by_request.quotient(rest);
        first = rest - static_cast<uint32_t>(request) * job.by_request.divisor;
        any = true;
    }
};

template <class Unit, bool kTable>
__device__ void copy_row(const WindowJob& job, const PlaneRun& run, const Place& place,
                         const Slot<kTable>& from, const Slot<kTable>& to) {
    const int64_t source = from.offset(job.pages, place), target = to.offset(job.pages, place);
    if (!within<kTable>(job.pages, source, job.report_as) ||
        !within<kTable>(job.pages, target, job.report_as))
        return;
    Unit row[kLayersPerThread];
#pragma unroll
    for (int i = 0; i < kLayersPerThread; ++i)
        if (i < run.count) row[i] = reinterpret_cast<const Unit*>(job.caches[run.first + i])[source];
#pragma unroll
    for (int i = 0; i < kLayersPerThread; ++i)
        if (i < run.count) reinterpret_cast<Unit*>(job.caches[run.first + i])[target] = row[i];
}

// The threads past the copying blocks: a request of a group for every kTokensAtOnce of them.
template <class Redirects, class OfRequest, class OfToken>
__device__ void redirect_tables(const WindowJob& job, const Redirects& redirect_of,
                                const OfRequest& of_request, const OfToken& of_token) {
    const WindowArguments& a = job.window;
    if (blockIdx.y > 0 || blockIdx.z > 0) return;
    const uint32_t threads = blockDim.x * blockDim.y * blockDim.z;
    const uint32_t item = (blockIdx.x - job.copy_blocks) * threads + thread_of_block();
    const uint32_t number = item / kTokensAtOnce, requests = static_cast<uint32_t>(a.num_requests);
    if (number >= requests * static_cast<uint32_t>(a.num_groups)) return;
    const uint32_t group = number / requests, request = number - group * requests;
    Found found{};
    const Redirect r = redirect_of(a, group, request, &found);
    const bool leads = item % kTokensAtOnce == 0;
    if (leads && found.problem != kNoWindowProblem)
        report(job.report_as, kOfWindow + found.problem, found.index, found.value, found.limit);
    if (leads) of_request(a, group, request, r);
    if (!r.any()) return;
    for (int64_t token = item % kTokensAtOnce; token < r.tokens(); token += kTokensAtOnce) {
        const Found wrong = of_token(a, group, request, r, token);
        if (wrong.problem != kNoWindowProblem)
            report(job.report_as, kOfWindow + wrong.problem, wrong.index, wrong.value, wrong.limit);
    }
}

template <class Unit, bool kTable>
__global__ void __launch_bounds__(kThreads) open_kernel(const __grid_constant__ WindowJob job) {
    const WindowArguments& a = job.window;
    wait_for_earlier_kernels();
    if (blockIdx.x >= job.copy_blocks)
        return redirect_tables(
            job, redirect_at_open,
            [](const WindowArguments& w, int64_t group, int64_t request, const Redirect& r) {
                open_request(w, group, request, r);
            },
            [](const WindowArguments& w, int64_t group, int64_t request, const Redirect& r, int64_t token) {
                return redirect_token(w, group, request, r, token);
            });
    const Place place = place_of_thread();
    const CopyTask task(job);
    if (!task.any || !job.row.has(place)) return;
    Found found{};
    const Redirect r = redirect_at_open(a, task.run.group, task.request, &found);
    if (!r.any()) return;
    const uint32_t real = static_cast<uint32_t>(r.tail_block);
    const uint32_t shadow =
        static_cast<uint32_t>(a.shadow_blocks[a.shadow_index(task.run.group, r.state, r.first_shadow)]);
    for (int64_t row = r.held + task.first; row < r.first_offset; row += job.rows_at_once)
        copy_row<Unit, kTable>(job, task.run, place, Slot<kTable>(real, static_cast<uint32_t>(row)),
                               Slot<kTable>(shadow, static_cast<uint32_t>(row)));
}

template <class Unit, bool kTable, bool kJudges>
__global__ void __launch_bounds__(kThreads) close_kernel(const __grid_constant__ WindowJob job) {
    const WindowArguments& a = job.window;
    wait_for_earlier_kernels();
    if constexpr (kJudges) {
        if (blockIdx.x >= job.first_judge) {
            fetch_requests(job.judge.accept);
            if (blockIdx.y == 0 && blockIdx.z == 0) judge_items(job.judge, blockIdx.x - job.first_judge);
            return;
        }
    }
    if (blockIdx.x >= job.copy_blocks)
        return redirect_tables(
            job, redirect_at_close,
            [](const WindowArguments& w, int64_t group, int64_t request, const Redirect& r) {
                close_request(w, group, request, r);
            },
            [](const WindowArguments& w, int64_t group, int64_t request, const Redirect& r, int64_t token) {
                put_back_token(w, group, request, r, token);
                return problem_of_saved(w, group, request, r, token);
            });
    const Place place = place_of_thread();
    const CopyTask task(job);
    if (!task.any || !job.row.has(place)) return;
    Found found{};
    const Redirect r = redirect_at_close(a, task.run.group, task.request, &found);
    if (!r.any()) return;
    for (int64_t token = task.first; token < r.tokens(); token += job.rows_at_once) {
        const int64_t slot = saved_slot(a, task.run.group, r, token);
        if (slot < 0 || !kept(a, r, token)) continue;
        const RedirectedPlace at = place_of(a, r, token);
        const int64_t shadow = a.shadow_blocks[a.shadow_index(task.run.group, r.state, at.shadow)];
        const int64_t block = quotient(slot, a.block_size);
        copy_row<Unit, kTable>(
            job, task.run, place,
            Slot<kTable>(static_cast<uint32_t>(shadow), static_cast<uint32_t>(at.offset)),
            Slot<kTable>(static_cast<uint32_t>(block), static_cast<uint32_t>(slot - block * a.block_size)));
    }
}

// One launch for as many planes as its parameters hold: the planes of each group in runs.
struct WindowLaunch {
    int64_t group = 0, in_group = 0;  // where the next one goes on

    // Fills runs and addresses; false when no plane is left.
    bool next(WindowJob& job, const std::vector<char*>& planes, const std::vector<int64_t>& planes_per_group,
              int64_t& plane) {
        job.num_runs = 0;
        int64_t taken = 0;
        while (group < static_cast<int64_t>(planes_per_group.size())) {
            const int64_t left = planes_per_group[static_cast<size_t>(group)] - in_group;
            if (left == 0) {
                ++group;
                in_group = 0;
                continue;
            }
            const int64_t count = std::min<int64_t>({left, kLayersPerThread, kPlanesPerWindow - taken});
            if (count == 0 || job.num_runs == kMostRuns) break;
            job.runs[job.num_runs++] = {static_cast<uint16_t>(taken), static_cast<uint8_t>(count),
                                        static_cast<uint8_t>(group)};
            std::copy_n(planes.begin() + plane, count, job.caches + taken);
            taken += count;
            plane += count;
            in_group += count;
        }
        return taken > 0;
    }
};

// The grid of one launch: blocks that copy, then blocks that redirect.
LaunchShape shape_for_window(WindowJob& job, int64_t most_rows, bool redirects) {
    const WindowArguments& a = job.window;
    const int64_t heads = std::max<int64_t>(job.row.num_heads, 1);
    const int64_t columns = std::max<int64_t>(job.row.columns, 1);
    const int64_t pairs = std::max<int64_t>(a.num_requests * job.num_runs, 1);
    const int64_t blocks = ceil_div(pairs * heads * columns, kThreads);
    job.rows_at_once = static_cast<uint32_t>(
        std::min(std::max(ceil_div(kBlocksOfCopies, blocks), kFewestRowsAtOnce), most_rows));
    job.by_request = FastDivisor(job.rows_at_once);
    job.by_run = FastDivisor(a.num_requests * job.rows_at_once);
    const bool copies = job.row.num_heads * job.row.columns > 0;
    LaunchShape shape =
        shape_for_rows(a.op, copies ? a.num_requests * job.num_runs * job.rows_at_once : 0, heads, columns);
    job.copy_blocks = shape.grid.x;
    const int64_t threads = shape.block.x * shape.block.y * shape.block.z;
    if (redirects)
        shape.grid.x +=
            static_cast<unsigned>(ceil_div(a.num_groups * a.num_requests * kTokensAtOnce, threads));
    return shape;
}

enum class WindowOp { kOpen, kClose, kJudgeAndClose };

template <class Unit, bool kTable, WindowOp kOp>
void launch_window(const WindowArguments& a, const AcceptArguments& accept, const Planes& planes,
                   const PageOffsets& offsets, const WindowTensors& t, int64_t most_rows, int64_t elements,
                   const Launch& launch) {
    WindowJob job{};
    job.window = a;
    job.row = RowShape(a.op, planes.view, elements);
    job.pages = in_units(planes.view, elements, offsets);
    job.report_as = report_as(a.op);
    WindowLaunch part;
    bool redirects = a.redirects;
    int64_t plane = 0;
    for (int64_t plane_of_part = 0; part.next(job, planes.data, t.planes_per_group, plane);
         plane_of_part = plane, redirects = false) {
        LaunchShape shape = shape_for_window(job, most_rows, redirects);
        job.first_judge = shape.grid.x;
        if constexpr (kOp == WindowOp::kJudgeAndClose) {
            if (plane_of_part == 0) {
                job.judge = {accept, INT32_MAX, job.report_as};
                const int64_t threads = shape.block.x * shape.block.y * shape.block.z;
                shape.grid.x += static_cast<unsigned>(ceil_div(items_to_judge(accept), threads));
            }
        }
        if (shape.grid.x == 0) continue;
        if constexpr (kOp == WindowOp::kOpen)
            launch.start(open_kernel<Unit, kTable>, shape, job);
        else
            launch.start(close_kernel<Unit, kTable, kOp == WindowOp::kJudgeAndClose>, shape, job);
    }
}

template <WindowOp kOp>
void run_window(const WindowArguments& a, const AcceptArguments& accept, const Planes& planes,
                const std::optional<Tensor>& page_offsets, const WindowTensors& t, int64_t most_rows) {
    const PageOffsets offsets = check_page_offsets(a.op, page_offsets, t.caches, t.plane_table);
    if (a.num_requests == 0 && items_to_judge(accept) == 0) return;
    const Launch launch(t.caches[0]);
    const bool table = offsets.table != nullptr;
    const int64_t size = planes.view.element_size;
    const int64_t elements =
        elements_per_access(size, [&](int64_t n) { return !table && planes_fit(planes, n); });
    if (table)
        with_raw_type(planes.view.element_size, [&](auto tag) {
            launch_window<typename decltype(tag)::type, true, kOp>(a, accept, planes, offsets, t, most_rows,
                                                                   elements, launch);
        });
    else
        with_access_type(elements * size, [&](auto tag) {
            launch_window<typename decltype(tag)::type, false, kOp>(a, accept, planes, offsets, t, most_rows,
                                                                    elements, launch);
        });
    check_launch(launch, complain);
}

void open_window(const std::vector<Tensor>& caches, const std::vector<int64_t>& planes_per_group,
                 const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens, const Tensor& seq_lens,
                 const Tensor& row_slots, const Tensor& shadow_blocks,
                 const std::vector<Tensor>& slot_mappings, const std::vector<Tensor>& block_tables,
                 const Tensor& saved_slots, const Tensor& tail_pages,
                 const std::optional<Tensor>& idx_mapping, const std::optional<Tensor>& held_slots,
                 const std::optional<Tensor>& page_offsets, int64_t num_bonus_tokens,
                 const std::optional<Tensor>& plane_table, bool leading_zero) {
    const WindowTensors t{caches,        planes_per_group, query_start_loc, cu_num_draft_tokens,
                          shadow_blocks, saved_slots,      tail_pages,      slot_mappings,
                          block_tables,  idx_mapping,      held_slots,      plane_table};
    Planes planes;
    const WindowArguments a = check_open(t, seq_lens, row_slots, {num_bonus_tokens, leading_zero}, &planes);
    run_window<WindowOp::kOpen>(a, {}, planes, page_offsets, t, planes.view.block_size);
}

// A target token and its drafts, where the caller sizes its rows by the batch.
int64_t most_rows_of(const WindowArguments& a) {
    const int64_t drafts = ceil_div(a.num_rows, std::max<int64_t>(a.num_requests, 1));
    return std::min(drafts + 1, kMostTokensAtOnce);
}

void close_window(const std::vector<Tensor>& caches, const std::vector<int64_t>& planes_per_group,
                  const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens,
                  const Tensor& row_rejected, const Tensor& shadow_blocks, const Tensor& saved_slots,
                  const Tensor& tail_pages, const std::vector<Tensor>& slot_mappings,
                  const std::vector<Tensor>& block_tables, const std::optional<Tensor>& idx_mapping,
                  const std::optional<Tensor>& held_slots, const std::optional<Tensor>& page_offsets,
                  int64_t num_bonus_tokens, const std::optional<Tensor>& plane_table, bool leading_zero) {
    const WindowTensors t{caches,        planes_per_group, query_start_loc, cu_num_draft_tokens,
                          shadow_blocks, saved_slots,      tail_pages,      slot_mappings,
                          block_tables,  idx_mapping,      held_slots,      plane_table};
    Planes planes;
    const WindowArguments a =
        check_close("close_window", t, row_rejected, {num_bonus_tokens, leading_zero}, &planes);
    run_window<WindowOp::kClose>(a, {}, planes, page_offsets, t, most_rows_of(a));
}

void close_window_from_rejected(
    const std::vector<Tensor>& caches, const std::vector<int64_t>& planes_per_group,
    const Tensor& query_start_loc, const Tensor& cu_num_draft_tokens, const Tensor& num_rejected,
    const Tensor& row_rejected, const Tensor& num_accepted, const Tensor& counters,
    const Tensor& shadow_blocks, const Tensor& saved_slots, const Tensor& tail_pages,
    const std::vector<Tensor>& slot_mappings, const std::vector<Tensor>& block_tables,
    const std::optional<Tensor>& idx_mapping, const std::optional<Tensor>& held_slots,
    const std::optional<Tensor>& page_offsets, int64_t num_bonus_tokens,
    const std::optional<Tensor>& plane_table, bool leading_zero) {
    const WindowTensors t{caches,        planes_per_group, query_start_loc, cu_num_draft_tokens,
                          shadow_blocks, saved_slots,      tail_pages,      slot_mappings,
                          block_tables,  idx_mapping,      held_slots,      plane_table};
    Planes planes;
    AcceptArguments accept{};
    const WindowArguments a = check_close_from_rejected(t, num_rejected, row_rejected, num_accepted, counters,
                                                        {num_bonus_tokens, leading_zero}, &planes, &accept);
    run_window<WindowOp::kJudgeAndClose>(a, accept, planes, page_offsets, t, most_rows_of(a));
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    m.impl("stage_kv", TORCH_BOX(&stage_kv));
    m.impl("accept_staged", TORCH_BOX(&accept_staged));
    m.impl("commit_staged", TORCH_BOX(&commit_staged));
    m.impl("move_slots", TORCH_BOX(&move_slots));
    m.impl("open_window", TORCH_BOX(&open_window));
    m.impl("close_window", TORCH_BOX(&close_window));
    m.impl("close_window_from_rejected", TORCH_BOX(&close_window_from_rejected));
}

}  // namespace nwor
