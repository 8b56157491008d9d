// Family shadow: argument checks, and the work for one request of a window. The CPU kernels loop over these
// functions, and the CUDA kernels call them in each thread, so both devices behave the same.
#pragma once

#include "accept.h"
#include "common/op.h"
#include "common/planes.h"

namespace nwor {

// The parameters of a launch are limited to 4 KB.
constexpr int64_t kMostWindowGroups = 16;

struct GroupTables {
    int64_t* slot_mapping;
    int32_t* block_table;
    int64_t row_stride, columns;
};

// Arguments of both ops, by value. Every index is checked before use, because a kernel may be replayed with
// any data.
struct WindowArguments {
    const char* op;
    bool redirects;  // whether slot mappings and block tables are given
    int64_t num_groups, num_requests, num_tokens, num_rows;
    int64_t num_blocks, block_size;
    const int32_t* query_start_loc;
    DraftStarts drafts_of;
    const int32_t* seq_lens;          // open
    const int64_t* row_slots;         // open: [G, R]
    const bool* row_rejected;         // close: [R]
    const int32_t* num_rejected;      // close: [Q], or null: replaces row_rejected
    const int32_t* shadow_blocks;     // [G, S, P]
    int64_t num_states, num_shadows;  // S, P
    Ids idx_mapping;                  // without data: request q has state q
    int64_t* saved_slots;             // [G, saved_stride]
    int64_t saved_stride;
    int32_t* tail_pages;  // [G, tail_stride]
    int64_t tail_stride;
    int64_t* held_slots;  // [G, S, P], or null
    GroupTables groups[kMostWindowGroups];

    NWOR_HOST_DEVICE int64_t shadow_index(int64_t group, int64_t state, int64_t shadow) const {
        return (group * num_states + state) * num_shadows + shadow;
    }
    NWOR_HOST_DEVICE int64_t state_of(int64_t request) const {
        return idx_mapping.data == nullptr ? request : idx_mapping[request];
    }
};

// The redirected tokens of one request in one group: the tokens of this step from the start of its tail page
// on.
struct Redirect {
    int64_t state;          // negative: nothing is redirected
    int64_t first_token;    // index in the batch
    int64_t given, drafts;  // number of other tokens, and of drafts
    int64_t without_slot;   // drafts at the end, past the longest sequence: they need no page
    int64_t first_row;      // log row of the first draft
    int64_t first_offset;   // offset of the first token in the tail page
    int64_t tail_page;      // index in the sequence
    int64_t first_shadow;   // tail_page % P
    int64_t tail_block;     // the request's own page
    int64_t held;           // rows of the tail page that the shadow page holds already
    int64_t accepted;       // accepted drafts, by num_rejected

    NWOR_HOST_DEVICE bool any() const { return state >= 0; }
    NWOR_HOST_DEVICE int64_t tokens() const { return given + drafts; }
};

// A token of a redirected request: its page, counted from the tail page, its offset in the page, and its
// shadow page.
struct RedirectedPlace {
    int64_t page, offset, shadow;
};

// Subtracts in a loop: a window spans a few pages, and division is slow on a GPU.
NWOR_HOST_DEVICE inline RedirectedPlace place_of(const WindowArguments& a, const Redirect& r, int64_t token) {
    RedirectedPlace place{0, r.first_offset + token, r.first_shadow};
    while (place.offset >= a.block_size) {
        place.offset -= a.block_size;
        ++place.page;
        if (++place.shadow == a.num_shadows) place.shadow = 0;
    }
    return place;
}

// The common part of open and close. `found` receives what is invalid about a request that has drafts.
NWOR_HOST_DEVICE inline Redirect drafts_of_request(const WindowArguments& a, int64_t request, Found* found) {
    Redirect r{};
    r.state = -1;
    r.first_row = a.drafts_of.before(request);
    r.drafts = a.drafts_of.until(request) - r.first_row;
    if (r.drafts < 0) *found = {kDraftStartsDecrease, request, r.first_row + r.drafts, r.first_row};
    if (r.drafts <= 0) return r;
    const int64_t start = a.query_start_loc[request], end = a.query_start_loc[request + 1];
    const int64_t state = a.state_of(request);
    r.first_token = end - r.drafts;
    r.given = r.first_token - start;
    if (r.first_row < 0 || r.first_row + r.drafts > a.num_rows)
        *found = {kWindowRows, request, r.first_row + r.drafts, a.num_rows};
    else if (start < 0 || r.given < 0 || end > a.num_tokens)
        *found = {kWindowTokens, request, end, a.num_tokens};
    else if (state < 0 || state >= a.num_states)
        *found = {kWindowState, request, state, a.num_states};
    else
        r.state = state;
    return r;
}

// Extends a redirect from the drafts to all redirected tokens, given the place of the first draft.
NWOR_HOST_DEVICE inline void set_tail(const WindowArguments& a, Redirect& r, int64_t tail_page,
                                      int64_t draft_offset) {
    r.tail_page = tail_page;
    r.first_shadow = tail_page - quotient(tail_page, a.num_shadows) * a.num_shadows;
    if (r.given > draft_offset) r.given = draft_offset;
    r.first_token -= r.given;
    r.first_offset = draft_offset - r.given;
}

// Returns what is invalid about the pages of a request, if anything.
NWOR_HOST_DEVICE inline Found problem_of_pages(const WindowArguments& a, int64_t group, int64_t request,
                                               const Redirect& r) {
    const int64_t pages = quotient(r.first_offset + r.tokens() - r.without_slot - 1, a.block_size) + 1;
    if (pages > a.num_shadows) return {kWindowPages, request, pages, a.num_shadows};
    if (a.redirects && r.tail_page + pages > a.groups[group].columns)
        return {kWindowColumns, request, r.tail_page + pages - 1, a.groups[group].columns};
    for (int64_t page = 0, shadow = r.first_shadow; page < pages; ++page) {
        const int64_t block = a.shadow_blocks[a.shadow_index(group, r.state, shadow)];
        if (block < 0 || block >= a.num_blocks) return {kWindowShadow, request, block, a.num_blocks};
        if (++shadow == a.num_shadows) shadow = 0;
    }
    return {};
}

// Computes what open_window redirects. It reads nothing that the same launch writes, so every thread gets the
// same result.
NWOR_HOST_DEVICE inline Redirect redirect_at_open(const WindowArguments& a, int64_t group, int64_t request,
                                                  Found* found) {
    Redirect r = drafts_of_request(a, request, found);
    if (!r.any()) return r;
    const int64_t slot = a.row_slots[group * a.num_rows + r.first_row];
    const int64_t position = a.seq_lens[request] - r.drafts;
    const int64_t state = r.state;
    r.state = -1;
    if (slot < 0) return r;
    if (slot >= a.num_blocks * a.block_size) {
        *found = {kWindowRowSlot, request, slot, a.num_blocks * a.block_size};
        return r;
    }
    r.tail_block = quotient(slot, a.block_size);
    const int64_t offset = slot - r.tail_block * a.block_size;
    const int64_t tail_page = position < 0 ? 0 : quotient(position, a.block_size);
    if (position - tail_page * a.block_size != offset) {
        *found = {kWindowPosition, request, slot, position};
        return r;
    }
    r.state = state;
    while (a.row_slots[group * a.num_rows + r.first_row + r.drafts - 1 - r.without_slot] < 0)
        ++r.without_slot;
    set_tail(a, r, tail_page, offset);
    if (const Found wrong = problem_of_pages(a, group, request, r)) {
        *found = wrong;
        r.state = -1;
        return r;
    }
    if (a.held_slots != nullptr) {
        const int64_t held = a.held_slots[a.shadow_index(group, state, r.first_shadow)];
        const int64_t page_start = r.tail_block * a.block_size;
        if (held >= page_start && held - page_start < a.block_size) r.held = held - page_start + 1;
    }
    return r;
}

// The original slot of a redirected token; negative if the token was not redirected, or if the slot is
// invalid, which `found` receives.
NWOR_HOST_DEVICE inline int64_t saved_slot(const WindowArguments& a, int64_t group, int64_t request,
                                           const Redirect& r, int64_t token, Found* found = nullptr) {
    const int64_t slot = a.saved_slots[group * a.saved_stride + r.first_token + token];
    const int64_t limit = a.num_blocks * a.block_size;
    if (slot < limit) return slot;
    if (found != nullptr) *found = {kWindowSavedSlot, request, slot, limit};
    return -1;
}

NWOR_HOST_DEVICE inline Found problem_of_saved(const WindowArguments& a, int64_t group, int64_t request,
                                               const Redirect& r, int64_t token) {
    Found found{};
    saved_slot(a, group, request, r, token, &found);
    return found;
}

// Computes what open_window has redirected.
NWOR_HOST_DEVICE inline Redirect redirect_at_close(const WindowArguments& a, int64_t group, int64_t request,
                                                   Found* found) {
    Redirect r = drafts_of_request(a, request, found);
    if (!r.any()) return r;
    if (a.num_rejected != nullptr) r.accepted = num_accepted_of(r.drafts, a.num_rejected[request]);
    const int64_t tail_page = a.tail_pages[group * a.tail_stride + request];
    // The slot of the first draft, because set_tail comes later.
    const int64_t slot = tail_page < 0 ? -1 : saved_slot(a, group, request, r, 0, found);
    if (slot < 0) {
        r.state = -1;
        return r;
    }
    while (a.saved_slots[group * a.saved_stride + r.first_token + r.drafts - 1 - r.without_slot] < 0)
        ++r.without_slot;
    r.tail_block = quotient(slot, a.block_size);
    set_tail(a, r, tail_page, slot - r.tail_block * a.block_size);
    if (const Found wrong = problem_of_pages(a, group, request, r)) {
        *found = wrong;
        r.state = -1;
    }
    return r;
}

NWOR_HOST_DEVICE inline int64_t shadow_slot(const WindowArguments& a, int64_t group, const Redirect& r,
                                            const RedirectedPlace& place) {
    const int64_t block = a.shadow_blocks[a.shadow_index(group, r.state, place.shadow)];
    return block * a.block_size + place.offset;
}

// Returns what is invalid about the slot of a token to redirect, if anything.
NWOR_HOST_DEVICE inline Found problem_of_token(const WindowArguments& a, int64_t group, int64_t request,
                                               const Redirect& r, int64_t token) {
    const int64_t slot = a.groups[group].slot_mapping[r.first_token + token];
    if (slot < 0) return {};
    if (slot >= a.num_blocks * a.block_size)
        return {kWindowMappedSlot, request, slot, a.num_blocks * a.block_size};
    const RedirectedPlace place = place_of(a, r, token);
    // Drafts without a slot in row_slots were not counted for the pages.
    if (token >= r.tokens() - r.without_slot ||
        slot - quotient(slot, a.block_size) * a.block_size != place.offset)
        return {kWindowMapping, request, slot, (r.tail_page + place.page) * a.block_size + place.offset};
    return {};
}

// Redirects the slot of one token and its page, and saves the old slot. Only one thread handles a token. All
// tokens of a page write the same table entry.
NWOR_HOST_DEVICE inline Found redirect_token(const WindowArguments& a, int64_t group, int64_t request,
                                             const Redirect& r, int64_t token) {
    const GroupTables& tables = a.groups[group];
    const int64_t t = r.first_token + token, slot = tables.slot_mapping[t];
    const Found found = problem_of_token(a, group, request, r, token);
    const bool redirected = slot >= 0 && !found;
    a.saved_slots[group * a.saved_stride + t] = redirected ? slot : -1;
    if (!redirected) return found;
    const RedirectedPlace place = place_of(a, r, token);
    const int64_t shadow = shadow_slot(a, group, r, place);
    tables.slot_mapping[t] = shadow;
    tables.block_table[request * tables.row_stride + r.tail_page + place.page] =
        static_cast<int32_t>(quotient(shadow, a.block_size));
    return {};
}

// Restores what redirect_token changed.
NWOR_HOST_DEVICE inline void put_back_token(const WindowArguments& a, int64_t group, int64_t request,
                                            const Redirect& r, int64_t token) {
    const GroupTables& tables = a.groups[group];
    const int64_t slot = saved_slot(a, group, request, r, token);
    if (slot < 0) return;
    tables.slot_mapping[r.first_token + token] = slot;
    tables.block_table[request * tables.row_stride + r.tail_page + place_of(a, r, token).page] =
        static_cast<int32_t>(quotient(slot, a.block_size));
}

// Per-request work of open: stores the tail page, and clears the held slots of a state without drafts.
NWOR_HOST_DEVICE inline void open_request(const WindowArguments& a, int64_t group, int64_t request,
                                          const Redirect& r) {
    a.tail_pages[group * a.tail_stride + request] = r.any() ? static_cast<int32_t>(r.tail_page) : -1;
    const int64_t state = a.state_of(request);
    if (a.held_slots == nullptr || r.drafts > 0 || state < 0 || state >= a.num_states) return;
    for (int64_t shadow = 0; shadow < a.num_shadows; ++shadow)
        a.held_slots[a.shadow_index(group, state, shadow)] = -1;
}

NWOR_HOST_DEVICE inline bool kept(const WindowArguments& a, const Redirect& r, int64_t token) {
    const int64_t draft = token - r.given;
    if (draft < 0) return true;
    return a.num_rejected != nullptr ? draft < r.accepted : !a.row_rejected[r.first_row + draft];
}

// Per-request work of close: stores which rows the shadow pages hold now. They hold the rows up to the first
// one that was not kept.
NWOR_HOST_DEVICE inline void close_request(const WindowArguments& a, int64_t group, int64_t request,
                                           const Redirect& r) {
    const int64_t state = a.state_of(request);
    if (a.held_slots == nullptr || r.drafts <= 0 || state < 0 || state >= a.num_states) return;
    for (int64_t shadow = 0; shadow < a.num_shadows; ++shadow)
        a.held_slots[a.shadow_index(group, state, shadow)] = -1;
    if (!r.any()) return;
    if (r.first_offset > 0)
        a.held_slots[a.shadow_index(group, state, r.first_shadow)] =
            r.tail_block * a.block_size + r.first_offset - 1;
    for (int64_t token = 0; token < r.tokens() && kept(a, r, token); ++token) {
        const int64_t slot = saved_slot(a, group, request, r, token);
        if (slot < 0) return;
        a.held_slots[a.shadow_index(group, state, place_of(a, r, token).shadow)] = slot;
    }
}

// The tables of all groups, or no table.
inline void check_tables(WindowArguments& a, const std::vector<Tensor>& slot_mappings,
                         const std::vector<Tensor>& block_tables, const Argument& saved, const Tensor& like) {
    a.redirects = !slot_mappings.empty();
    for (const auto* tables : {&slot_mappings, &block_tables})
        if (tables->size() != static_cast<size_t>(a.redirects ? a.num_groups : 0))
            fail(a.op, tables == &slot_mappings ? "slot_mappings" : "block_tables",
                 " must hold one tensor for each of the ", a.num_groups,
                 " groups, or slot_mappings and block_tables none, got ", tables->size());
    a.num_tokens = a.redirects ? slot_mappings[0].numel() : saved.tensor.size(1);
    for (size_t g = 0; g < slot_mappings.size(); ++g) {
        const std::string of_group = "[" + std::to_string(g) + "]";
        const std::string slots_name = "slot_mappings" + of_group, table_name = "block_tables" + of_group;
        const Argument slots{a.op, slots_name.c_str(), slot_mappings[g]},
            table{a.op, table_name.c_str(), block_tables[g]};
        a.groups[g].slot_mapping = int64_view(slots, 0, "[num_tokens]").data;
        if (slots.tensor.size(0) != a.num_tokens)
            slots.must_be("of the length of slot_mappings[0], ", describe(slot_mappings[0]));
        table.dtype(ScalarType::Int);
        if (table.tensor.dim() != 2 || table.tensor.size(0) < a.num_requests)
            table.must_be("[>= ", a.num_requests, ", max_num_blocks]");
        if (table.tensor.size(1) > 1 && table.tensor.stride(1) != 1) table.must_be("contiguous along a row");
        for (const Argument& other : {slots, table}) other.same_device(like);
        must_not_overlap(a.op, slots, saved);
        a.groups[g].block_table = static_cast<int32_t*>(table.tensor.data_ptr());
        a.groups[g].row_stride = table.tensor.stride(0);
        a.groups[g].columns = table.tensor.size(1);
    }
    if (saved.tensor.size(1) < a.num_tokens)
        saved.must_be("[num_groups, >= ", a.num_tokens, "], a place for each token");
}

// A contiguous tensor whose first dimension is the group.
template <class T>
T* by_group_view(const Argument& a, ScalarType dtype, int64_t groups, int64_t dims, const char* shape) {
    a.dtype(dtype);
    if (a.tensor.dim() != dims || a.tensor.size(0) != groups) a.must_be(shape, " with ", groups, " groups");
    a.contiguous();
    return static_cast<T*>(a.tensor.data_ptr());
}

inline void check_planes_per_group(WindowArguments& a, int64_t num_planes,
                                   const std::vector<int64_t>& planes_per_group) {
    a.num_groups = static_cast<int64_t>(planes_per_group.size());
    if (a.num_groups < 1 || a.num_groups > kMostWindowGroups)
        fail(a.op, "planes_per_group must hold 1 to ", kMostWindowGroups, " groups, got ", a.num_groups);
    int64_t planes = 0;
    for (const int64_t count : planes_per_group) {
        check_not_negative(a.op, "planes_per_group", count);
        planes += count;
    }
    if (planes != num_planes)
        fail(a.op, "planes_per_group must add up to the ", num_planes, " planes, got ", planes);
}

// Common arguments of the three ops.
struct WindowTensors {
    const std::vector<Tensor>& caches;
    const std::vector<int64_t>& planes_per_group;
    const Tensor &query_start_loc, &draft_start_loc, &shadow_blocks, &saved_slots, &tail_pages;
    const std::vector<Tensor>&slot_mappings, &block_tables;
    const std::optional<Tensor>&idx_mapping, &held_slots, &page_offsets, &plane_table;
};

enum class WindowOp { kOpen, kClose, kAcceptAndClose };

struct WindowCall {
    WindowOp kind;
    WindowArguments window;
    Planes planes;
    std::vector<int64_t> planes_per_group;
    PageOffsets page_offsets;
    AcceptArguments accept;  // for kAcceptAndClose
    bool has_states;         // whether idx_mapping is given
};

inline WindowCall check_window(const char* op, WindowOp kind, const WindowTensors& t) {
    WindowCall call{};
    call.kind = kind;
    call.planes = check_planes(op, t.caches, t.plane_table);
    call.planes_per_group = t.planes_per_group;
    const CacheView& cache = call.planes.view;
    WindowArguments& a = call.window;
    a.op = op;
    a.num_blocks = cache.num_blocks;
    a.block_size = cache.block_size;
    if (a.block_size < 1 || cache.num_slots() > INT32_MAX)
        fail(op, "caches must have fewer than 2^31 slots in blocks of at least one, got ",
             describe(t.caches[0]));
    check_planes_per_group(a, call.planes.count(), t.planes_per_group);
    const Tensor& first = t.caches[0];
    const Argument qsl{op, "query_start_loc", t.query_start_loc},
        ds{op, "draft_start_loc", t.draft_start_loc}, shadows{op, "shadow_blocks", t.shadow_blocks},
        saved{op, "saved_slots", t.saved_slots}, tails{op, "tail_pages", t.tail_pages};
    check_outside_planes(op, call.planes, first, {ds});  // the next line reads it
    a.drafts_of = check_draft_starts(ds, &a.num_requests);
    a.query_start_loc = int32_view(qsl, a.num_requests + 1, "[num_requests + 1]").data;
    const char* by_page = "[num_groups, num_states, num_shadow_pages]";
    a.shadow_blocks = by_group_view<int32_t>(shadows, ScalarType::Int, a.num_groups, 3, by_page);
    a.num_states = t.shadow_blocks.size(1);
    a.num_shadows = t.shadow_blocks.size(2);
    if (a.num_shadows < 1) shadows.must_be("of at least one page for each state");
    a.saved_slots =
        by_group_view<int64_t>(saved, ScalarType::Long, a.num_groups, 2, "[num_groups, num_tokens]");
    a.saved_stride = t.saved_slots.size(1);
    a.tail_pages =
        by_group_view<int32_t>(tails, ScalarType::Int, a.num_groups, 2, "[num_groups, num_requests]");
    a.tail_stride = t.tail_pages.size(1);
    if (a.tail_stride < a.num_requests) tails.must_be("[num_groups, >= ", a.num_requests, "]");
    for (const Argument& other : {qsl, ds, shadows, saved, tails}) other.same_device(first);
    check_tables(a, t.slot_mappings, t.block_tables, saved, first);
    call.has_states = t.idx_mapping.has_value();
    if (call.has_states) {
        const Argument idx{op, "idx_mapping", *t.idx_mapping};
        a.idx_mapping = ids_view(idx, a.num_requests, "[num_requests]");
        idx.same_device(first);
    }
    if (t.held_slots.has_value()) {
        const Argument held{op, "held_slots", *t.held_slots};
        a.held_slots = by_group_view<int64_t>(held, ScalarType::Long, a.num_groups, 3, by_page);
        if (t.held_slots->size(1) != a.num_states || t.held_slots->size(2) != a.num_shadows)
            held.must_be("of the shape of shadow_blocks, ", describe(t.shadow_blocks));
        held.same_device(first);
    }
    call.page_offsets = check_page_offsets(op, t.page_offsets, t.caches, t.plane_table);
    std::vector<Argument> written{saved, tails};
    for (const Tensor& slots : t.slot_mappings) written.push_back({op, "slot_mappings", slots});
    for (const Tensor& table : t.block_tables) written.push_back({op, "block_tables", table});
    add_given(written, op, "held_slots", t.held_slots);
    for (const Argument& a : written) check_elements_apart(a);
    check_outside_planes(op, call.planes, first, written);
    std::vector<Argument> read{qsl, shadows};
    add_given(read, op, "idx_mapping", t.idx_mapping);
    add_given(read, op, "page_offsets", t.page_offsets);
    check_outside_planes(op, call.planes, first, read);
    if (t.page_offsets.has_value())
        for (const Argument& table : written)
            must_not_overlap(op, table, Placed("page_offsets", *t.page_offsets));
    return call;
}

inline WindowCall check_open(
    const char* op,
    const std::vector<Tensor>& caches,  // each [num_blocks, block_size, num_kv_heads, width], written
    const std::vector<int64_t>& planes_per_group,
    const Tensor& query_start_loc,              // int32 [num_requests + 1]
    const Tensor& draft_start_loc,              // int32 [num_requests + 1]
    const Tensor& seq_lens,                     // int32 [num_requests]
    const Tensor& row_slots,                    // int64 [num_groups, num_rows]
    const Tensor& shadow_blocks,                // int32 [num_groups, num_states, num_shadow_pages]
    const std::vector<Tensor>& slot_mappings,   // each int64 [num_tokens], written
    const std::vector<Tensor>& block_tables,    // each int32 [num_requests, max_num_blocks], written
    const Tensor& saved_slots,                  // int64 [num_groups, num_tokens], written
    const Tensor& tail_pages,                   // int32 [num_groups, num_requests], written
    const std::optional<Tensor>& idx_mapping,   // ids [num_requests]
    const std::optional<Tensor>& held_slots,    // int64 [num_groups, num_states, num_shadow_pages], written
    const std::optional<Tensor>& page_offsets,  // int32 [block_size, width]
    const std::optional<Tensor>& plane_table    // int64 [planes, 2], see planes.h
) {
    WindowCall call = check_window(
        op, WindowOp::kOpen,
        {caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, saved_slots, tail_pages,
         slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, plane_table});
    WindowArguments& a = call.window;
    const Argument lens{op, "seq_lens", seq_lens}, slots{op, "row_slots", row_slots};
    a.seq_lens = int32_view(lens, a.num_requests, "[num_requests]").data;
    a.row_slots = by_group_view<int64_t>(slots, ScalarType::Long, a.num_groups, 2, "[num_groups, num_rows]");
    a.num_rows = row_slots.size(1);
    for (const Argument& other : {lens, slots}) other.same_device(caches[0]);
    check_outside_planes(op, call.planes, caches[0], {lens, slots});
    return call;
}

inline WindowCall check_closing(const char* op, WindowOp kind, const WindowTensors& t,
                                const Tensor& row_rejected) {
    WindowCall call = check_window(op, kind, t);
    const Argument rejected{op, "row_rejected", row_rejected};
    call.window.row_rejected = bool_view(rejected, 0, "[num_rows]").data;
    rejected.same_device(t.caches[0]);
    check_outside_planes(op, call.planes, t.caches[0], {rejected});
    call.window.num_rows = row_rejected.size(0);
    return call;
}

inline WindowCall check_close(
    const char* op,
    const std::vector<Tensor>& caches,  // each [num_blocks, block_size, num_kv_heads, width], written
    const std::vector<int64_t>& planes_per_group,
    const Tensor& query_start_loc,              // int32 [num_requests + 1]
    const Tensor& draft_start_loc,              // int32 [num_requests + 1]
    const Tensor& row_rejected,                 // bool [num_log_rows]
    const Tensor& shadow_blocks,                // int32 [num_groups, num_states, num_shadow_pages]
    const Tensor& saved_slots,                  // int64 [num_groups, num_tokens]
    const Tensor& tail_pages,                   // int32 [num_groups, num_requests]
    const std::vector<Tensor>& slot_mappings,   // each int64 [num_tokens], written
    const std::vector<Tensor>& block_tables,    // each int32 [num_requests, max_num_blocks], written
    const std::optional<Tensor>& idx_mapping,   // ids [num_requests]
    const std::optional<Tensor>& held_slots,    // int64 [num_groups, num_states, num_shadow_pages], written
    const std::optional<Tensor>& page_offsets,  // int32 [block_size, width]
    const std::optional<Tensor>& plane_table    // int64 [planes, 2], see planes.h
) {
    return check_closing(
        op, WindowOp::kClose,
        {caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, saved_slots, tail_pages,
         slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, plane_table},
        row_rejected);
}

inline WindowCall check_close_from_rejected(
    const char* op,
    const std::vector<Tensor>& caches,  // each [num_blocks, block_size, num_kv_heads, width], written
    const std::vector<int64_t>& planes_per_group,
    const Tensor& query_start_loc,              // int32 [num_requests + 1]
    const Tensor& draft_start_loc,              // int32 [num_requests + 1]
    const Tensor& num_rejected,                 // int32 [num_requests]
    const Tensor& row_rejected,                 // bool [num_log_rows], written
    const Tensor& num_accepted,                 // int32 [num_requests], written
    const Tensor& counters,                     // int64 [len(COUNTERS)], written
    const Tensor& shadow_blocks,                // int32 [num_groups, num_states, num_shadow_pages]
    const Tensor& saved_slots,                  // int64 [num_groups, num_tokens]
    const Tensor& tail_pages,                   // int32 [num_groups, num_requests]
    const std::vector<Tensor>& slot_mappings,   // each int64 [num_tokens], written
    const std::vector<Tensor>& block_tables,    // each int32 [num_requests, max_num_blocks], written
    const std::optional<Tensor>& idx_mapping,   // ids [num_requests]
    const std::optional<Tensor>& held_slots,    // int64 [num_groups, num_states, num_shadow_pages], written
    const std::optional<Tensor>& page_offsets,  // int32 [block_size, width]
    const std::optional<Tensor>& plane_table    // int64 [planes, 2], see planes.h
) {
    WindowCall call = check_closing(
        op, WindowOp::kAcceptAndClose,
        {caches, planes_per_group, query_start_loc, draft_start_loc, shadow_blocks, saved_slots, tail_pages,
         slot_mappings, block_tables, idx_mapping, held_slots, page_offsets, plane_table},
        row_rejected);
    std::vector<Argument> inputs{{op, "query_start_loc", query_start_loc},
                                 {op, "shadow_blocks", shadow_blocks},
                                 {op, "saved_slots", saved_slots},
                                 {op, "tail_pages", tail_pages}};
    for (const Tensor& slots : slot_mappings) inputs.push_back({op, "slot_mappings", slots});
    for (const Tensor& table : block_tables) inputs.push_back({op, "block_tables", table});
    add_given(inputs, op, "idx_mapping", idx_mapping);
    add_given(inputs, op, "held_slots", held_slots);
    add_given(inputs, op, "page_offsets", page_offsets);
    call.accept =
        check_reject_counts(op, num_rejected, draft_start_loc, row_rejected, num_accepted, counters, inputs);
    check_outside_planes(
        op, call.planes, caches[0],
        {{op, "num_rejected", num_rejected}, {op, "num_accepted", num_accepted}, {op, "counters", counters}});
    call.window.num_rejected = call.accept.num_rejected;
    return call;
}

template <class F>
void each_written(const WindowCall& call, const F& f) {
    const WindowArguments& a = call.window;
    each_plane_range(call.planes, f);
    f(range_at(a.saved_slots, a.num_groups * a.saved_stride));
    f(range_at(a.tail_pages, a.num_groups * a.tail_stride));
    if (a.held_slots != nullptr) f(range_at(a.held_slots, a.num_groups * a.num_states * a.num_shadows));
    for (int64_t g = 0; a.redirects && g < a.num_groups; ++g) {
        f(range_at(a.groups[g].slot_mapping, a.num_tokens));
        f(range_at(a.groups[g].block_table,
                   (a.num_requests - 1) * a.groups[g].row_stride + a.groups[g].columns));
    }
    if (call.kind == WindowOp::kAcceptAndClose) each_written(call.accept, f);
}

inline void set_step(WindowCall& call, const WindowCall& checked, StepArguments& step) {
    WindowArguments& a = call.window;
    Begun& window = step.window;
    check_requests(a.op, window.num_requests, checked.window.num_requests);
    a.num_requests = window.num_requests;
    // plan_window has checked the queries, and open_window the states.
    check_outside(a.op, "query_start_loc", window.query_start_loc, checked);
    a.query_start_loc = window.query_start_loc.data;
    if (call.kind == WindowOp::kOpen) {
        const Argument lens{a.op, "seq_lens", needed(a.op, "seq_lens", step.seq_lens)};
        const Vector<int32_t> lengths = int32_view(lens, a.num_requests, "[num_requests]");
        check_outside(a.op, lens.name, lengths, checked);
        a.seq_lens = lengths.data;
        if (step.idx_mapping != nullptr)
            window.idx_mapping =
                ids_view({a.op, "idx_mapping", *step.idx_mapping}, a.num_requests, "[num_requests]");
    }
    if (call.has_states != window.idx_mapping.has_value())
        fail(a.op, "idx_mapping must be given exactly if the bound call has it");
    if (call.has_states) {
        a.idx_mapping = *window.idx_mapping;
        check_outside(a.op, "idx_mapping", a.idx_mapping, checked);
    }
    if (call.kind != WindowOp::kAcceptAndClose) return;
    set_step(call.accept, checked.accept, step, checked);
    a.num_rejected = call.accept.num_rejected;
}

// ---------------------------------------------------------------- the ops

template <class Device>
void register_shadow(Library& m) {
    NWOR_BINDABLE_OP(m, open_window, check_open);
    NWOR_BINDABLE_OP(m, close_window, check_close);
    NWOR_BINDABLE_OP(m, close_window_from_rejected, check_close_from_rejected);
}

}  // namespace nwor
