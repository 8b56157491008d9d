// Family shadow on CUDA: windows redirected to shadow pages. Semantics: nwor_ops/ops/shadow.py.
#include "../shadow.h"
#include "acceptance.h"
#include "rows.h"

namespace nwor {
namespace {

constexpr int kTokensAtOnce = 8;           // tokens of a request that adjacent threads redirect
constexpr int64_t kMostTokensAtOnce = 16;  // tokens of a request that are copied at the same time, at most
// Number of blocks that copy at the same time: enough for several per multiprocessor. A larger grid only adds
// blocks without a row. Threads that copy more than a few rows in sequence are slower too.
constexpr int64_t kBlocksOfCopies = 4 * kEnoughBlocks;
constexpr int64_t kFewestRowsAtOnce = 3;
constexpr int64_t kPlanesPerWindow = 320;
constexpr int64_t kMostRuns = kPlanesPerWindow / kLayersPerThread + kMostWindowGroups;

// Planes that one thread handles together. They belong to one group, so they share slots.
struct PlaneRun {
    uint16_t first;
    uint8_t count, group;
};

struct WindowJob {
    WindowArguments window;
    RowShape row;
    Pages pages;  // layout of every plane; `data` is not used
    uint32_t copy_blocks, rows_at_once;
    FastDivisor by_run, by_request;  // divide a row index of the launch
    uint32_t num_runs;
    const char* report_as;
    AcceptJob acceptance;         // for a launch that also determines outcomes
    uint32_t first_accept_block;  // its first block; the blocks before it copy and redirect
    PlaneRun runs[kMostRuns];
    char* caches[kPlanesPerWindow];
};
static_assert(sizeof(WindowJob) <= 4096, "kernel parameters are at most 4 KB on every architecture");

// Work of a copying thread: every `rows_at_once`-th row of one request in one run of planes.
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

// Work of the threads after the copying blocks: kTokensAtOnce of them handle one request of a group.
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
    if (leads && found) report(job.report_as, found);
    if (leads) of_request(a, group, request, r);
    if (!r.any()) return;
    for (int64_t token = item % kTokensAtOnce; token < r.tokens(); token += kTokensAtOnce) {
        if (const Found wrong = of_token(a, group, request, r, token)) report(job.report_as, wrong);
    }
}

// Grid: first `copy_blocks` blocks (in x) that copy committed rows, in the shape of `shape_for_rows`: the
// rows of a launch are runs of planes x requests x `rows_at_once`. The blocks after them redirect slots and
// tables: groups x requests x 8 threads.
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
    if (found && !a.redirects) report(job.report_as, found);  // no other blocks do
    if (!r.any()) return;
    const uint32_t real = static_cast<uint32_t>(r.tail_block);
    const uint32_t shadow =
        static_cast<uint32_t>(a.shadow_blocks[a.shadow_index(task.run.group, r.state, r.first_shadow)]);
    for (int64_t row = r.held + task.first; row < r.first_offset; row += job.rows_at_once)
        copy_row<Unit, kTable>(job, task.run, place, Slot<kTable>(real, static_cast<uint32_t>(row)),
                               Slot<kTable>(shadow, static_cast<uint32_t>(row)));
}

// Grid: as `open_kernel`. With kAccepts, the blocks from `first_accept_block` on determine the outcomes.
template <class Unit, bool kTable, bool kAccepts>
__global__ void __launch_bounds__(kThreads) close_kernel(const __grid_constant__ WindowJob job) {
    const WindowArguments& a = job.window;
    wait_for_earlier_kernels();
    if constexpr (kAccepts) {
        if (blockIdx.x >= job.first_accept_block) {
            fetch_requests(job.acceptance.accept);
            if (blockIdx.y == 0 && blockIdx.z == 0)
                accept_items(job.acceptance, blockIdx.x - job.first_accept_block);
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
    if (found && !a.redirects) report(job.report_as, found);  // no other blocks do
    if (!r.any()) return;
    for (int64_t token = task.first; token < r.tokens(); token += job.rows_at_once) {
        const int64_t slot = saved_slot(a, task.run.group, task.request, r, token, &found);
        if (found && !a.redirects) report(job.report_as, found);
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

// One launch with as many planes as its parameters hold. The planes of each group form runs.
struct WindowLaunch {
    int64_t group = 0, in_group = 0;  // position of the next plane

    // Fills runs and addresses. Returns false if no plane is left.
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

template <class Unit, bool kTable, WindowOp kOp>
void launch_window(const WindowCall& call, int64_t most_rows, int64_t elements, const Launch& launch) {
    const WindowArguments& a = call.window;
    WindowJob job{};
    job.window = a;
    job.row = RowShape(a.op, call.planes.view, elements);
    job.pages = in_units(call.planes.view, elements, call.page_offsets);
    job.report_as = report_as(a.op);
    WindowLaunch part;
    bool redirects = a.redirects;
    int64_t plane = 0;
    for (int64_t plane_of_part = 0; part.next(job, call.planes.data, call.planes_per_group, plane);
         plane_of_part = plane, redirects = false) {
        LaunchShape shape = shape_for_window(job, most_rows, redirects);
        job.first_accept_block = shape.grid.x;
        if constexpr (kOp == WindowOp::kAcceptAndClose) {
            if (plane_of_part == 0) {
                job.acceptance = {call.accept, job.report_as};
                const int64_t threads = shape.block.x * shape.block.y * shape.block.z;
                shape.grid.x += static_cast<unsigned>(ceil_div(items_to_accept(call.accept), threads));
            }
        }
        if (shape.grid.x == 0) continue;
        if constexpr (kOp == WindowOp::kOpen)
            launch.start(open_kernel<Unit, kTable>, shape, job);
        else
            launch.start(close_kernel<Unit, kTable, kOp == WindowOp::kAcceptAndClose>, shape, job);
    }
}

template <WindowOp kOp>
void run_window(const WindowCall& call, int64_t most_rows, const Launch& launch) {
    if (call.window.num_requests == 0 && items_to_accept(call.accept) == 0) return;
    const bool table = call.page_offsets.table != nullptr;
    const int64_t size = call.planes.view.element_size;
    const int64_t elements =
        elements_per_access(size, [&](int64_t n) { return !table && planes_fit(call.planes, n); });
    if (table)
        with_raw_type(call.planes.view.element_size, [&](auto tag) {
            launch_window<typename decltype(tag)::type, true, kOp>(call, most_rows, elements, launch);
        });
    else
        with_access_type(elements * size, [&](auto tag) {
            launch_window<typename decltype(tag)::type, false, kOp>(call, most_rows, elements, launch);
        });
    check_launch(launch);
}

// One target token and its drafts, if the caller sizes the rows by the batch.
int64_t most_rows_of(const WindowArguments& a) {
    const int64_t drafts = ceil_div(a.num_rows, std::max<int64_t>(a.num_requests, 1));
    return std::min(drafts + 1, kMostTokensAtOnce);
}

void run(const WindowCall& call, const Launch& launch) {
    switch (call.kind) {
        case WindowOp::kOpen:
            return run_window<WindowOp::kOpen>(call, call.window.block_size, launch);
        case WindowOp::kClose:
            return run_window<WindowOp::kClose>(call, most_rows_of(call.window), launch);
        case WindowOp::kAcceptAndClose:
            return run_window<WindowOp::kAcceptAndClose>(call, most_rows_of(call.window), launch);
    }
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CUDA, m) {
    register_shadow<Launch>(m);
}

}  // namespace nwor
