// Family stage: what its ops may be given, and what one request of a window comes to. The CPU kernels loop
// over these functions and the CUDA kernels call them in each thread, so the two cannot drift apart.
#pragma once

#include "draft.h"

namespace nwor {

// ---------------------------------------------------------------- stage_kv

struct StageArguments {
    const char* op;
    int64_t num_tokens, num_rows;
    const int32_t* stage_rows;
    // Of key and value.
    CacheView shapes[2];  // heads, width and element size of a row; the rest is not used
    RowsView sources[2], staged[2];
    RowWindows row_windows;
};

inline void check_staged(const Argument& staged, const Argument& source, int64_t num_tokens) {
    const Tensor &t = staged.tensor, &s = source.tensor;
    if (s.dim() != 3 || s.size(0) < num_tokens)
        source.must_be("[>= " + std::to_string(num_tokens) + ", num_kv_heads, width]");
    staged.dtype(s.scalar_type());
    if (t.dim() != 3 || t.size(1) != s.size(1) || t.size(2) != s.size(2)) {
        std::ostringstream text;
        text << "[num_rows, " << s.size(1) << ", " << s.size(2) << "]";
        staged.must_be(text.str());
    }
}

inline CacheView shape_of_rows(const Tensor& rows) {
    CacheView shape{};
    shape.num_blocks = shape.block_size = 1;
    shape.num_heads = rows.size(1);
    shape.width = rows.size(2);
    shape.element_size = static_cast<int32_t>(rows.element_size());
    return shape;
}

inline StageArguments check_stage(const Tensor& key, const Tensor& value, const Tensor& stage_rows,
                                  const Tensor& staged_key, const Tensor& staged_value,
                                  const std::optional<Tensor>& window_id,
                                  const std::optional<Tensor>& row_windows) {
    const char* op = "stage_kv";
    const Argument k{op, "key", key}, v{op, "value", value}, rows{op, "stage_rows", stage_rows},
        sk{op, "staged_key", staged_key}, sv{op, "staged_value", staged_value};
    rows.vector(ScalarType::Int, 0, "[num_tokens]");
    const ScalarType dtype = key.scalar_type();
    if (dtype != ScalarType::Float && dtype != ScalarType::Half && dtype != ScalarType::BFloat16)
        k.must_have_dtype("torch.float32, torch.float16 or torch.bfloat16");
    v.dtype(dtype);
    StageArguments a{};
    a.op = op;
    a.num_tokens = stage_rows.size(0);
    check_staged(sk, k, a.num_tokens);
    check_staged(sv, v, a.num_tokens);
    if (value.size(1) != key.size(1)) v.must_be("of the heads of key, " + describe(key));
    a.num_rows = staged_key.size(0);
    if (staged_value.size(0) != a.num_rows)
        sv.must_be("of as many rows as staged_key, " + describe(staged_key));
    for (const Argument& other : {v, rows, sk, sv}) other.same_device(key);
    for (const Argument& staged : {sk, sv})
        for (const Argument& source : {k, v}) must_not_overlap(op, Placed(staged), Placed(source));
    must_not_overlap(op, Placed(sk), Placed(sv));
    a.stage_rows = static_cast<const int32_t*>(stage_rows.data_ptr());
    a.shapes[0] = shape_of_rows(key);
    a.shapes[1] = shape_of_rows(value);
    a.sources[0] = rows_view(key);
    a.sources[1] = rows_view(value);
    a.staged[0] = rows_view(staged_key);
    a.staged[1] = rows_view(staged_value);
    a.row_windows = check_row_windows(op, window_id, row_windows, key, a.num_rows);
    return a;
}

// ---------------------------------------------------------------- accept_staged, commit_staged

inline Acceptance check_acceptance(const char* op, const Tensor& row_accepted, int64_t num_rows,
                                   const std::optional<Tensor>& row_requests,
                                   const std::optional<Tensor>& row_positions, const Tensor& like) {
    const Argument accepted{op, "row_accepted", row_accepted};
    Acceptance a{};
    if (row_requests.has_value() != row_positions.has_value())
        fail(op, "row_requests and row_positions must be given together");
    if (!row_requests.has_value()) {
        accepted.vector(ScalarType::Bool, num_rows, "[num_rows]");
        a.flags = static_cast<const bool*>(row_accepted.data_ptr());
    } else {
        const Argument requests{op, "row_requests", *row_requests},
            places{op, "row_positions", *row_positions};
        accepted.vector(ScalarType::Int, 0, "[num_requests]");
        for (const Argument& rows : {requests, places}) {
            rows.vector(ScalarType::Int, num_rows, "[num_rows]");
            rows.same_device(like);
        }
        a.lengths = static_cast<const int32_t*>(row_accepted.data_ptr());
        a.row_requests = static_cast<const int32_t*>(row_requests->data_ptr());
        a.row_positions = static_cast<const int32_t*>(row_positions->data_ptr());
        a.num_requests = row_accepted.size(0);
    }
    accepted.same_device(like);
    return a;
}

inline WriteArguments check_commit(const Tensor& staged_key, const Tensor& staged_value,
                                   const Tensor& row_slots, const Tensor& row_accepted,
                                   const Tensor& key_cache, const Tensor& value_cache, const Tensor& k_scale,
                                   const Tensor& v_scale, const std::string& kv_cache_dtype,
                                   const std::optional<Tensor>& row_requests,
                                   const std::optional<Tensor>& row_positions) {
    const char* op = "commit_staged";
    WriteArguments w = check_write(op, staged_key, staged_value, key_cache, value_cache, row_slots, k_scale,
                                   v_scale, kv_cache_dtype, {"staged_key", "staged_value", "row_slots"});
    w.accepted = check_acceptance(op, row_accepted, w.num_tokens, row_requests, row_positions, staged_key);
    return w;
}

// Order of the `counters` tensor of accept_staged; the names are STAGE_COUNTERS in ops_stage.py.
enum StageCounter {
    kStageWindows,
    kStageStaged,
    kStageOperations,
    kStageCommitted,
    kStageRejected,
    kStageIncomplete,
    kNumStageCounters
};

struct AcceptStagedArguments {
    const char* op;
    Acceptance accepted;
    int64_t num_rows, num_layers, num_slots;
    const int64_t* row_slots;
    const int64_t* window_id;
    const int64_t* row_windows;  // [L, R]
    bool* row_committed;
    int64_t* counters;

    // How many layers have staged a row in this window.
    NWOR_HOST_DEVICE int64_t layers_of(int64_t row, int64_t window) const {
        int64_t layers = 0;
        for (int64_t layer = 0; layer < num_layers; ++layer)
            layers += row_windows[layer * num_rows + row] == window;
        return layers;
    }
    NWOR_HOST_DEVICE bool wanted(int64_t row) const { return row_slots[row] >= 0 && accepted.accepts(row); }
    NWOR_HOST_DEVICE bool possible(int64_t row, int64_t layers) const {
        return layers == num_layers && row_slots[row] < num_slots;
    }
};

inline AcceptStagedArguments check_accept_staged(const Tensor& row_accepted, const Tensor& row_slots,
                                                 const Tensor& window_id, const Tensor& row_windows,
                                                 int64_t num_slots, const Tensor& row_committed,
                                                 const Tensor& counters,
                                                 const std::optional<Tensor>& row_requests,
                                                 const std::optional<Tensor>& row_positions) {
    const char* op = "accept_staged";
    const Argument slots{op, "row_slots", row_slots}, windows{op, "row_windows", row_windows},
        committed{op, "row_committed", row_committed}, counts{op, "counters", counters};
    AcceptStagedArguments a{};
    a.op = op;
    slots.vector(ScalarType::Long, 0, "[num_rows]");
    a.num_rows = row_slots.size(0);
    a.accepted = check_acceptance(op, row_accepted, a.num_rows, row_requests, row_positions, row_slots);
    windows.dtype(ScalarType::Long);
    if (row_windows.dim() != 2 || row_windows.size(0) < 1 || row_windows.size(1) != a.num_rows)
        windows.must_be("[>= 1, " + std::to_string(a.num_rows) + "], one number for each row of each layer");
    a.num_layers = row_windows.size(0);
    check_row_windows(op, window_id, row_windows, row_slots, a.num_rows, a.num_layers);
    if (num_slots < 0) fail(op, "num_slots must not be negative, got ", num_slots);
    a.num_slots = num_slots;
    committed.vector(ScalarType::Bool, a.num_rows, "[num_rows]");
    counts.vector(ScalarType::Long, kNumStageCounters, "[len(STAGE_COUNTERS)]");
    for (const Argument& other : {committed, counts}) other.same_device(row_slots);
    must_not_overlap(op, committed.name, row_committed, "row_accepted", row_accepted);
    a.row_slots = static_cast<const int64_t*>(row_slots.data_ptr());
    a.window_id = static_cast<const int64_t*>(window_id.data_ptr());
    a.row_windows = static_cast<const int64_t*>(row_windows.data_ptr());
    a.row_committed = static_cast<bool*>(row_committed.data_ptr());
    a.counters = static_cast<int64_t*>(counters.data_ptr());
    return a;
}

// ---------------------------------------------------------------- move_slots

struct MoveArguments {
    const char* op;
    Planes planes;
    int64_t num_moves;
    const int64_t *from, *to;
    PageOffsets page_offsets;
};

// A plane that is given twice would be moved twice.
inline void check_distinct(const char* op, const Planes& planes) {
    std::vector<char*> starts = planes.data;
    std::sort(starts.begin(), starts.end());
    const auto twice = std::adjacent_find(starts.begin(), starts.end());
    if (twice == starts.end() || planes.bytes == 0) return;
    const auto first = std::find(planes.data.begin(), planes.data.end(), *twice);
    const auto second = std::find(first + 1, planes.data.end(), *twice);
    fail(op, "caches[", first - planes.data.begin(), "] and caches[", second - planes.data.begin(),
         "] must not share memory");
}

inline MoveArguments check_move(const std::vector<Tensor>& caches, const Tensor& src_slots,
                                const Tensor& dst_slots, const std::optional<Tensor>& page_offsets) {
    const char* op = "move_slots";
    MoveArguments m{};
    m.op = op;
    m.planes = check_planes(op, caches);
    check_distinct(op, m.planes);
    const Argument from{op, "src_slots", src_slots}, to{op, "dst_slots", dst_slots};
    from.vector(ScalarType::Long, 0, "[num_moves]");
    to.vector(ScalarType::Long, 0, "[num_moves]");
    if (dst_slots.size(0) != src_slots.size(0))
        to.must_be("one slot for each of src_slots, " + describe(src_slots));
    for (const Argument& slots : {from, to}) slots.same_device(caches[0]);
    m.num_moves = src_slots.size(0);
    m.from = static_cast<const int64_t*>(src_slots.data_ptr());
    m.to = static_cast<const int64_t*>(dst_slots.data_ptr());
    m.page_offsets = check_page_offsets(op, page_offsets, caches);
    return m;
}

// ---------------------------------------------------------------- open_window, close_window

// A launch's parameters are 4 KB in all.
constexpr int64_t kMostWindowGroups = 16;

struct GroupTables {
    int64_t* slot_mapping;
    int32_t* block_table;
    int64_t row_stride, columns;
};

// What both ops are given, by value. Every index is checked where it is used: a kernel may be replayed with
// any data.
struct WindowArguments {
    const char* op;
    bool redirects;  // slot mappings and block tables are given
    int64_t num_groups, num_requests, num_tokens, num_rows;
    int64_t num_blocks, block_size;
    const int32_t* query_start_loc;
    CumulativeDrafts drafts_of;
    const int32_t* seq_lens;          // open
    const int64_t* row_slots;         // open: [G, R]
    const bool* row_rejected;         // close: [R]
    const int32_t* num_rejected;      // close: [Q], or null: in place of row_rejected
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

enum WindowProblem {
    kNoWindowProblem,
    kWindowTokens,
    kWindowRows,
    kWindowState,
    kWindowPosition,
    kWindowPages,
    kWindowColumns,
    kWindowShadow,
    kWindowSlot,
};

[[noreturn]] inline void complain_of_window(const char* op, const Found& f) {
    switch (f.problem) {
        case kWindowTokens:
            fail(op, "query_start_loc must give each request its drafts among the ", f.limit,
                 " tokens, got the end ", f.value, " for request ", f.index);
        case kWindowRows:
            fail(op, "cu_num_draft_tokens must not exceed the ", f.limit, " rows of the window, got ",
                 f.value, " at request ", f.index);
        case kWindowState:
            fail<std::out_of_range>(op, "idx_mapping must be in [0, ", f.limit,
                                    ") for a request with drafts, got ", f.value, " for request ", f.index);
        case kWindowPosition:
            fail(op, "row_slots must name the place in a page that the position of a draft has, got slot ",
                 f.value, " at position ", f.limit, " of request ", f.index);
        case kWindowPages:
            fail(op, "shadow_blocks must have a page for each page that a request's drafts touch, got ",
                 f.limit, " pages where request ", f.index, " needs ", f.value);
        case kWindowColumns:
            fail<std::out_of_range>(op, "block_tables must have a column for every page, got ", f.limit,
                                    " columns where request ", f.index, " has page ", f.value);
        case kWindowShadow:
            fail<std::out_of_range>(op, "shadow_blocks must be in [0, ", f.limit, "), got ", f.value,
                                    " for request ", f.index);
        default:
            fail<std::out_of_range>(op, "the slots of a request must be below ", f.limit, ", got ", f.value,
                                    " for request ", f.index);
    }
}

// The redirected tokens of one request in one group: those of this step from the start of its tail page on.
struct Redirect {
    int64_t state;          // less than 0: nothing is redirected
    int64_t first_token;    // its number in the batch
    int64_t given, drafts;  // tokens that are no drafts, and drafts
    int64_t without_slot;   // drafts at the end, past the longest sequence: they need no page
    int64_t first_row;      // of the first draft
    int64_t first_offset;   // place of the first token in the tail page
    int64_t tail_page;      // in the sequence
    int64_t first_shadow;   // tail_page % P
    int64_t tail_block;     // the real page
    int64_t held;           // rows of the tail page that the shadow page has already
    int64_t accepted;       // drafts that stay, by num_rejected

    NWOR_HOST_DEVICE bool any() const { return state >= 0; }
    NWOR_HOST_DEVICE int64_t tokens() const { return given + drafts; }
};

// A token of a redirected request: its page, counted from the tail page, its place in it, and its shadow
// page.
struct RedirectedPlace {
    int64_t page, offset, shadow;
};

// By subtraction: a window spans a few pages, and a GPU divides slowly.
NWOR_HOST_DEVICE inline RedirectedPlace place_of(const WindowArguments& a, const Redirect& r, int64_t token) {
    RedirectedPlace place{0, r.first_offset + token, r.first_shadow};
    while (place.offset >= a.block_size) {
        place.offset -= a.block_size;
        ++place.page;
        if (++place.shadow == a.num_shadows) place.shadow = 0;
    }
    return place;
}

NWOR_HOST_DEVICE inline int64_t quotient(int64_t n, int64_t d) {
    return static_cast<uint32_t>(n) / static_cast<uint32_t>(d);  // both fit; 64 bits take four times as long
}

// What open and close find alike. `found` tells what is wrong with a request that has drafts.
NWOR_HOST_DEVICE inline Redirect drafts_of_request(const WindowArguments& a, int64_t request, Found* found) {
    Redirect r{};
    r.state = -1;
    r.first_row = a.drafts_of.before(request);
    r.drafts = a.drafts_of.until(request) - r.first_row;
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

// From the drafts alone to all redirected tokens, given where the first draft lies.
NWOR_HOST_DEVICE inline void set_tail(const WindowArguments& a, Redirect& r, int64_t tail_page,
                                      int64_t draft_offset) {
    r.tail_page = tail_page;
    r.first_shadow = tail_page - quotient(tail_page, a.num_shadows) * a.num_shadows;
    if (r.given > draft_offset) r.given = draft_offset;
    r.first_token -= r.given;
    r.first_offset = draft_offset - r.given;
}

// What is wrong with the pages of a request, if anything.
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

// What open_window redirects. Reads nothing that the same launch writes, so every thread finds the same.
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
        *found = {kWindowSlot, request, slot, a.num_blocks * a.block_size};
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
    const Found wrong = problem_of_pages(a, group, request, r);
    if (wrong.problem != kNoWindowProblem) {
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

// The own slot of a token that was redirected, else less than 0.
NWOR_HOST_DEVICE inline int64_t saved_slot(const WindowArguments& a, int64_t group, const Redirect& r,
                                           int64_t token) {
    const int64_t slot = a.saved_slots[group * a.saved_stride + r.first_token + token];
    return slot < a.num_blocks * a.block_size ? slot : -1;
}

// What open_window has redirected.
NWOR_HOST_DEVICE inline Redirect redirect_at_close(const WindowArguments& a, int64_t group, int64_t request,
                                                   Found* found) {
    Redirect r = drafts_of_request(a, request, found);
    if (!r.any()) return r;
    if (a.num_rejected != nullptr) r.accepted = num_accepted_of(r.drafts, a.num_rejected[request]);
    const int64_t tail_page = a.tail_pages[group * a.tail_stride + request];
    const int64_t slot = saved_slot(a, group, r, 0);  // of the first draft: set_tail comes later
    if (tail_page < 0 || slot < 0) {
        r.state = -1;
        return r;
    }
    while (a.saved_slots[group * a.saved_stride + r.first_token + r.drafts - 1 - r.without_slot] < 0)
        ++r.without_slot;
    r.tail_block = quotient(slot, a.block_size);
    set_tail(a, r, tail_page, slot - r.tail_block * a.block_size);
    const Found wrong = problem_of_pages(a, group, request, r);
    if (wrong.problem != kNoWindowProblem) {
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

// What is wrong with the slot of a token that is to be redirected, if anything.
NWOR_HOST_DEVICE inline Found problem_of_token(const WindowArguments& a, int64_t group, int64_t request,
                                               const Redirect& r, int64_t token) {
    const int64_t slot = a.groups[group].slot_mapping[r.first_token + token];
    if (slot < 0) return {};
    if (slot >= a.num_blocks * a.block_size) return {kWindowSlot, request, slot, a.num_blocks * a.block_size};
    const RedirectedPlace place = place_of(a, r, token);
    // Pages were counted without the drafts that have no slot in row_slots.
    if (token >= r.tokens() - r.without_slot ||
        slot - quotient(slot, a.block_size) * a.block_size != place.offset)
        return {kWindowPosition, request, slot, (r.tail_page + place.page) * a.block_size + place.offset};
    return {};
}

// Redirects the slot of one token and its page, and saves what was there. Only its own thread touches the
// token; all tokens of a page write the same entry.
NWOR_HOST_DEVICE inline Found redirect_token(const WindowArguments& a, int64_t group, int64_t request,
                                             const Redirect& r, int64_t token) {
    const GroupTables& tables = a.groups[group];
    const int64_t t = r.first_token + token, slot = tables.slot_mapping[t];
    const Found found = problem_of_token(a, group, request, r, token);
    const bool redirected = slot >= 0 && found.problem == kNoWindowProblem;
    a.saved_slots[group * a.saved_stride + t] = redirected ? slot : -1;
    if (!redirected) return found;
    const RedirectedPlace place = place_of(a, r, token);
    const int64_t shadow = shadow_slot(a, group, r, place);
    tables.slot_mapping[t] = shadow;
    tables.block_table[request * tables.row_stride + r.tail_page + place.page] =
        static_cast<int32_t>(quotient(shadow, a.block_size));
    return {};
}

// What is wrong with the slot that was saved for a token, if anything.
NWOR_HOST_DEVICE inline Found problem_of_saved(const WindowArguments& a, int64_t group, int64_t request,
                                               const Redirect& r, int64_t token) {
    const int64_t slot = a.saved_slots[group * a.saved_stride + r.first_token + token];
    const int64_t limit = a.num_blocks * a.block_size;
    return slot < limit ? Found{} : Found{kWindowSlot, request, slot, limit};
}

// Puts back what redirect_token changed.
NWOR_HOST_DEVICE inline void put_back_token(const WindowArguments& a, int64_t group, int64_t request,
                                            const Redirect& r, int64_t token) {
    const GroupTables& tables = a.groups[group];
    const int64_t slot = saved_slot(a, group, r, token);
    if (slot < 0) return;
    tables.slot_mapping[r.first_token + token] = slot;
    tables.block_table[request * tables.row_stride + r.tail_page + place_of(a, r, token).page] =
        static_cast<int32_t>(quotient(slot, a.block_size));
}

// What a request needs once, at open: which page its tail is, and that a state without drafts holds nothing.
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

// The same at close: what the shadow pages hold from now on. Rows are alike up to the first that was not
// kept.
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
        const int64_t slot = saved_slot(a, group, r, token);
        if (slot < 0) return;
        a.held_slots[a.shadow_index(group, state, place_of(a, r, token).shadow)] = slot;
    }
}

// The tables of each group, or none of any.
inline void check_tables(WindowArguments& a, const std::vector<Tensor>& slot_mappings,
                         const std::vector<Tensor>& block_tables, const Tensor& saved_slots,
                         const Tensor& like) {
    a.redirects = !slot_mappings.empty();
    for (const auto* tables : {&slot_mappings, &block_tables})
        if (tables->size() != static_cast<size_t>(a.redirects ? a.num_groups : 0))
            fail(a.op, tables == &slot_mappings ? "slot_mappings" : "block_tables",
                 " must hold one tensor for each of the ", a.num_groups,
                 " groups, or slot_mappings and block_tables none, got ", tables->size());
    a.num_tokens = a.redirects ? slot_mappings[0].numel() : saved_slots.size(1);
    for (size_t g = 0; g < slot_mappings.size(); ++g) {
        const std::string of_group = "[" + std::to_string(g) + "]";
        const std::string slots_name = "slot_mappings" + of_group, table_name = "block_tables" + of_group;
        const Argument slots{a.op, slots_name.c_str(), slot_mappings[g]},
            table{a.op, table_name.c_str(), block_tables[g]};
        slots.vector(ScalarType::Long, 0, "[num_tokens]");
        if (slots.tensor.size(0) != a.num_tokens)
            slots.must_be("of the length of slot_mappings[0], " + describe(slot_mappings[0]));
        table.dtype(ScalarType::Int);
        if (table.tensor.dim() != 2 || table.tensor.size(0) < a.num_requests)
            table.must_be("[>= " + std::to_string(a.num_requests) + ", max_num_blocks]");
        if (table.tensor.size(1) > 1 && table.tensor.stride(1) != 1) table.must_be("contiguous along a row");
        for (const Argument& other : {slots, table}) other.same_device(like);
        must_not_overlap(a.op, slots.name, slots.tensor, "saved_slots", saved_slots);
        a.groups[g] = {static_cast<int64_t*>(slots.tensor.data_ptr()),
                       static_cast<int32_t*>(table.tensor.data_ptr()), table.tensor.stride(0),
                       table.tensor.size(1)};
    }
    if (saved_slots.size(1) < a.num_tokens)
        Argument{a.op, "saved_slots", saved_slots}.must_be("[num_groups, >= " + std::to_string(a.num_tokens) +
                                                           "], a place for each token");
}

// A contiguous tensor whose first dimension is the group.
inline void check_by_group(const Argument& a, ScalarType dtype, int64_t groups, int64_t dims,
                           const char* shape) {
    a.dtype(dtype);
    if (a.tensor.dim() != dims || a.tensor.size(0) != groups)
        a.must_be(std::string(shape) + " with " + std::to_string(groups) + " groups");
    a.contiguous();
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

struct WindowTensors {
    const std::vector<Tensor>& caches;
    const std::vector<int64_t>& planes_per_group;
    const Tensor &query_start_loc, &cu_num_draft_tokens, &shadow_blocks, &saved_slots, &tail_pages;
    const std::vector<Tensor>&slot_mappings, &block_tables;
    const std::optional<Tensor>&idx_mapping, &held_slots, &plane_table;
};

// What open and close have in common.
inline WindowArguments check_window(const char* op, const WindowTensors& t, const Counting& counting,
                                    Planes* planes) {
    WindowArguments a{};
    a.op = op;
    *planes = check_planes(op, t.caches, t.plane_table);
    a.num_blocks = planes->view.num_blocks;
    a.block_size = planes->view.block_size;
    if (a.block_size < 1 || planes->view.num_slots() > INT32_MAX)
        fail(op, "caches must have fewer than 2^31 slots in blocks of at least one, got ",
             describe(t.caches[0]));
    check_planes_per_group(a, planes->count(), t.planes_per_group);
    const Tensor& first = t.caches[0];
    const Argument qsl{op, "query_start_loc", t.query_start_loc},
        cu{op, "cu_num_draft_tokens", t.cu_num_draft_tokens}, shadows{op, "shadow_blocks", t.shadow_blocks},
        saved{op, "saved_slots", t.saved_slots}, tails{op, "tail_pages", t.tail_pages};
    a.drafts_of = check_cumulative_drafts(cu, counting, &a.num_requests);
    qsl.vector(ScalarType::Int, a.num_requests + 1, "[num_requests + 1]");
    check_by_group(shadows, ScalarType::Int, a.num_groups, 3, "[num_groups, num_states, num_shadow_pages]");
    if (t.shadow_blocks.size(2) < 1) shadows.must_be("of at least one page for each state");
    check_by_group(saved, ScalarType::Long, a.num_groups, 2, "[num_groups, num_tokens]");
    check_by_group(tails, ScalarType::Int, a.num_groups, 2, "[num_groups, num_requests]");
    if (t.tail_pages.size(1) < a.num_requests)
        tails.must_be("[num_groups, >= " + std::to_string(a.num_requests) + "]");
    for (const Argument& other : {qsl, cu, shadows, saved, tails}) other.same_device(first);
    check_tables(a, t.slot_mappings, t.block_tables, t.saved_slots, first);
    if (t.idx_mapping.has_value()) {
        const Argument idx{op, "idx_mapping", *t.idx_mapping};
        a.idx_mapping = ids_view(idx, a.num_requests, "[num_requests]");
        idx.same_device(first);
    }
    if (t.held_slots.has_value()) {
        const Argument held{op, "held_slots", *t.held_slots};
        check_by_group(held, ScalarType::Long, a.num_groups, 3, "[num_groups, num_states, num_shadow_pages]");
        if (t.held_slots->size(1) != t.shadow_blocks.size(1) ||
            t.held_slots->size(2) != t.shadow_blocks.size(2))
            held.must_be("of the shape of shadow_blocks, " + describe(t.shadow_blocks));
        held.same_device(first);
        a.held_slots = static_cast<int64_t*>(t.held_slots->data_ptr());
    }
    a.query_start_loc = static_cast<const int32_t*>(t.query_start_loc.data_ptr());
    a.shadow_blocks = static_cast<const int32_t*>(t.shadow_blocks.data_ptr());
    a.num_states = t.shadow_blocks.size(1);
    a.num_shadows = t.shadow_blocks.size(2);
    a.saved_slots = static_cast<int64_t*>(t.saved_slots.data_ptr());
    a.saved_stride = t.saved_slots.size(1);
    a.tail_pages = static_cast<int32_t*>(t.tail_pages.data_ptr());
    a.tail_stride = t.tail_pages.size(1);
    return a;
}

inline WindowArguments check_open(const WindowTensors& t, const Tensor& seq_lens, const Tensor& row_slots,
                                  const Counting& counting, Planes* planes) {
    WindowArguments a = check_window("open_window", t, counting, planes);
    const Argument lens{a.op, "seq_lens", seq_lens}, slots{a.op, "row_slots", row_slots};
    lens.vector(ScalarType::Int, a.num_requests, "[num_requests]");
    check_by_group(slots, ScalarType::Long, a.num_groups, 2, "[num_groups, num_rows]");
    for (const Argument& other : {lens, slots}) other.same_device(t.caches[0]);
    a.seq_lens = static_cast<const int32_t*>(seq_lens.data_ptr());
    a.row_slots = static_cast<const int64_t*>(row_slots.data_ptr());
    a.num_rows = row_slots.size(1);
    return a;
}

inline WindowArguments check_close(const char* op, const WindowTensors& t, const Tensor& row_rejected,
                                   const Counting& counting, Planes* planes) {
    WindowArguments a = check_window(op, t, counting, planes);
    const Argument rejected{a.op, "row_rejected", row_rejected};
    rejected.vector(ScalarType::Bool, 0, "[num_rows]");
    rejected.same_device(t.caches[0]);
    a.row_rejected = static_cast<const bool*>(row_rejected.data_ptr());
    a.num_rows = row_rejected.size(0);
    return a;
}

inline WindowArguments check_close_from_rejected(const WindowTensors& t, const Tensor& num_rejected,
                                                 const Tensor& row_rejected, const Tensor& num_accepted,
                                                 const Tensor& counters, const Counting& counting,
                                                 Planes* planes, AcceptArguments* accept) {
    const char* op = "close_window_from_rejected";
    WindowArguments a = check_close(op, t, row_rejected, counting, planes);
    std::vector<Placed> others{Placed("query_start_loc", t.query_start_loc),
                               Placed("shadow_blocks", t.shadow_blocks), Placed("saved_slots", t.saved_slots),
                               Placed("tail_pages", t.tail_pages)};
    for (const Tensor& slots : t.slot_mappings) others.emplace_back("slot_mappings", slots);
    for (const Tensor& table : t.block_tables) others.emplace_back("block_tables", table);
    if (t.idx_mapping.has_value()) others.emplace_back("idx_mapping", *t.idx_mapping);
    if (t.held_slots.has_value()) others.emplace_back("held_slots", *t.held_slots);
    *accept = check_reject_counts(op, num_rejected, t.cu_num_draft_tokens, row_rejected, num_accepted,
                                  counters, counting, others);
    a.num_rejected = accept->num_rejected;
    return a;
}

}  // namespace nwor
