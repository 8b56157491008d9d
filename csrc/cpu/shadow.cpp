// Family shadow on the CPU: windows redirected to shadow pages. Semantics: nwor_ops/ops/shadow.py.
#include "../shadow.h"

#include <vector>

#include "acceptance.h"
#include "rows.h"

namespace nwor {
namespace {

struct Copy {
    int64_t group, from, to;  // from and to are slots
};

// The redirects of all requests, group by group. Raises before anything is written.
template <class Find, class ProblemOfToken>
std::vector<Redirect> redirects_of(const WindowArguments& a, const Find& find,
                                   const ProblemOfToken& problem_of) {
    std::vector<Redirect> redirects;
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t q = 0; q < a.num_requests; ++q) {
            Found found{};
            redirects.push_back(find(a, g, q, &found));
            const Redirect& r = redirects.back();
            for (int64_t token = 0; r.any() && token < r.tokens() && !found; ++token)
                found = problem_of(a, g, q, r, token);
            if (found) complain(a.op, found);
        }
    return redirects;
}

Found problem_at_open(const WindowArguments& a, int64_t group, int64_t request, const Redirect& r,
                      int64_t token) {
    return a.redirects ? problem_of_token(a, group, request, r, token) : Found{};
}

template <class Raw>
void copy_slot(const CacheView& cache, const PageOffsets& offsets, const Copy& copy, std::vector<Raw>& row) {
    if (offsets.table == nullptr)
        return copy_row(slot_data<Raw>(cache, copy.to), strides_of(cache),
                        slot_data<const Raw>(cache, copy.from), strides_of(cache), cache.num_heads,
                        cache.width);
    for (int64_t head = 0; head < cache.num_heads; ++head) {
        copy_head<false>(cache, offsets, copy.from, head, row.data());
        copy_head<true>(cache, offsets, copy.to, head, row.data());
    }
}

template <class Raw>
void copy_in_planes(const WindowCall& call, const std::vector<Copy>& copies) {
    std::vector<int64_t> group_of;
    for (size_t g = 0; g < call.planes_per_group.size(); ++g)
        group_of.insert(group_of.end(), static_cast<size_t>(call.planes_per_group[g]),
                        static_cast<int64_t>(g));
    parallel_for(0, call.planes.count(), 1, [&](int64_t begin, int64_t end) {
        std::vector<Raw> row(static_cast<size_t>(call.planes.view.width));
        for (int64_t plane = begin; plane < end; ++plane)
            for (const Copy& copy : copies)
                if (copy.group == group_of[static_cast<size_t>(plane)])
                    copy_slot(call.planes.plane(plane), call.page_offsets, copy, row);
    });
}

void copy_all(const WindowCall& call, const std::vector<Copy>& copies) {
    const CacheView& cache = call.planes.view;
    if (copies.empty() || cache.num_heads * cache.width == 0) return;
    with_raw_type(cache.element_size,
                  [&](auto tag) { copy_in_planes<typename decltype(tag)::type>(call, copies); });
}

void open(const WindowCall& call) {
    const WindowArguments& a = call.window;
    const std::vector<Redirect> redirects = redirects_of(a, redirect_at_open, problem_at_open);
    std::vector<Copy> copies;
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t q = 0; q < a.num_requests; ++q) {
            const Redirect& r = redirects[static_cast<size_t>(g * a.num_requests + q)];
            if (a.redirects) open_request(a, g, q, r);
            if (!r.any()) continue;
            const int64_t shadow = shadow_slot(a, g, r, {0, 0, r.first_shadow});
            for (int64_t row = r.held; row < r.first_offset; ++row)
                copies.push_back({g, r.tail_block * a.block_size + row, shadow + row});
            for (int64_t token = 0; a.redirects && token < r.tokens(); ++token)
                redirect_token(a, g, q, r, token);
        }
    copy_all(call, copies);
}

void close(const WindowCall& call) {
    const WindowArguments& a = call.window;
    const std::vector<Redirect> redirects = redirects_of(a, redirect_at_close, problem_of_saved);
    if (call.kind == WindowOp::kAcceptAndClose) accept(call.accept);
    std::vector<Copy> copies;
    for (int64_t g = 0; g < a.num_groups; ++g)
        for (int64_t q = 0; q < a.num_requests; ++q) {
            const Redirect& r = redirects[static_cast<size_t>(g * a.num_requests + q)];
            if (a.redirects) close_request(a, g, q, r);
            for (int64_t token = 0; r.any() && token < r.tokens(); ++token) {
                const int64_t to = saved_slot(a, g, q, r, token);
                if (to < 0) continue;
                if (kept(a, r, token)) copies.push_back({g, shadow_slot(a, g, r, place_of(a, r, token)), to});
                if (a.redirects) put_back_token(a, g, q, r, token);
            }
        }
    copy_all(call, copies);
}

void run(const WindowCall& call, const Cpu&) {
    if (call.kind == WindowOp::kAcceptAndClose) check_drafts(call.accept);
    check_page_table(call.window.op, call.page_offsets, call.planes.view);
    if (call.kind == WindowOp::kOpen)
        open(call);
    else
        close(call);
}

}  // namespace

STABLE_TORCH_LIBRARY_IMPL(nwor, CPU, m) {
    register_shadow<Cpu>(m);
}

}  // namespace nwor
