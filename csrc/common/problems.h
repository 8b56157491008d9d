// Invalid data, with one message per case. The CPU kernels check before they write, and raise. A CUDA kernel
// stores it in a record, which debug mode raises.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>

#include "argument.h"

namespace nwor {

// Every problem, the Python error that it raises, and its message.
// clang-format off
#define NWOR_PROBLEMS(X) \
    X(kSlotMapping, kIndexError, \
      "slot_mapping[{index}] must be below {limit} (num_blocks * block_size), got {value}") \
    X(kRowSlots, kIndexError, \
      "row_slots[{index}] must be below {limit} (num_blocks * block_size), got {value}") \
    X(kSrcSlots, kIndexError, \
      "src_slots[{index}] must be below {limit} (num_blocks * block_size), got {value}") \
    X(kDstSlots, kIndexError, \
      "dst_slots[{index}] must be below {limit} (num_blocks * block_size), got {value}") \
    X(kLogRows, kIndexError, "log_rows[{index}] must be below the {limit} rows of the log, got {value}") \
    X(kStageRows, kIndexError, \
      "stage_rows[{index}] must be below the {limit} rows of the staging buffer, got {value}") \
    X(kPageOffsets, kIndexError, \
      "page_offsets must lie within the storage of the cache ({limit} elements), got offset {value}") \
    X(kQueriesDecrease, kValueError, \
      "query_start_loc must start at 0 or above and not decrease, got {limit} and {value} around " \
      "request {index}") \
    X(kDraftsDecrease, kValueError, \
      "cu_num_draft_tokens must not decrease, got {value} at request {index} after {limit}") \
    X(kDraftStartsFirst, kValueError, "draft_start_loc must begin with 0, got {value}") \
    X(kDraftStartsDecrease, kValueError, \
      "draft_start_loc must not decrease, got {limit} and {value} around request {index}") \
    X(kMoreDraftsThanTokens, kValueError, \
      "cu_num_draft_tokens must give a request no more drafts than tokens, got {value} drafts in the " \
      "{limit} tokens of request {index}") \
    X(kDraftPastTokens, kValueError, \
      "slot_mappings must cover every draft, got {limit} tokens where request {index} ends at token " \
      "{value}") \
    X(kMoreDraftsThanRows, kValueError, \
      "row_slots must have a row for each draft, got {limit} rows for {value} drafts") \
    X(kMoreDraftsThanColumns, kValueError, \
      "sampled_token_ids must have a column for each draft, got {limit} columns for the {value} drafts " \
      "of request {index}") \
    X(kMoreDraftsThanIds, kValueError, \
      "draft_start_loc must not exceed the {limit} entries of draft_token_ids, got {value}") \
    X(kMoreDraftsThanMarks, kValueError, \
      "draft_start_loc must not exceed num_draft_tokens ({limit}), got {value}") \
    X(kMoreDraftsThanFlags, kValueError, \
      "draft_start_loc must not exceed the {limit} rows of row_rejected, got {value}") \
    X(kWindowTokens, kValueError, \
      "query_start_loc must give each request its drafts among the {limit} tokens, got the end {value} " \
      "for request {index}") \
    X(kWindowRows, kValueError, \
      "draft_start_loc must not exceed the {limit} rows of the window, got {value} at request {index}") \
    X(kWindowState, kIndexError, \
      "idx_mapping must be in [0, {limit}) for a request with drafts, got {value} for request {index}") \
    X(kWindowPosition, kValueError, \
      "row_slots must have the offset in its page that the position of a draft has, got slot {value} at " \
      "position {limit} of request {index}") \
    X(kWindowMapping, kValueError, \
      "slot_mappings must have the offset in its page that the position of a token has, and no slot for " \
      "a draft without one in row_slots, got slot {value} at position {limit} of request {index}") \
    X(kWindowPages, kValueError, \
      "shadow_blocks must have a page for each page that a request's drafts touch, got {limit} pages " \
      "where request {index} needs {value}") \
    X(kWindowColumns, kIndexError, \
      "block_tables must have a column for every page, got {limit} columns where request {index} has " \
      "page {value}") \
    X(kWindowShadow, kIndexError, "shadow_blocks must be in [0, {limit}), got {value} for request {index}") \
    X(kWindowRowSlot, kIndexError, "row_slots must be below {limit}, got {value} for request {index}") \
    X(kWindowMappedSlot, kIndexError, \
      "slot_mappings must be below {limit}, got {value} for request {index}") \
    X(kWindowSavedSlot, kIndexError, "saved_slots must be below {limit}, got {value} for request {index}") \
    X(kTargetQueriesDecrease, kValueError, \
      "target_query_start_loc must start at 0 or above and not decrease, got {limit} and {value} around " \
      "request {index}") \
    X(kTokensPastTarget, kValueError, \
      "target_input_ids and target_positions must cover every token, got {limit} where request {index} " \
      "ends at token {value}") \
    X(kTokensPastPositions, kValueError, \
      "positions must cover every token, got {limit} where request {index} ends at token {value}") \
    X(kTokensPastFlags, kValueError, \
      "positions and is_rejected must cover every token, got {limit} where request {index} ends at " \
      "token {value}") \
    X(kTokensPastIds, kValueError, \
      "input_ids must hold every token, got {limit} places where request {index} ends at token {value}") \
    X(kTokensPastHidden, kValueError, \
      "hidden_state_mapping must hold every token, got {limit} places where request {index} ends at " \
      "token {value}") \
    X(kTokensPastSlots, kValueError, \
      "slot_mapping must hold every token, got {limit} places where request {index} ends at token " \
      "{value}") \
    X(kTokensPastMappings, kValueError, \
      "slot_mappings must hold every token, got {limit} places where request {index} ends at token " \
      "{value}") \
    X(kRealAfterPadded, kValueError, \
      "idx_mapping must have its negative entries last, got {value} at row {index} after a negative one") \
    X(kStateOutside, kIndexError, \
      "idx_mapping must be below {limit}, the number of request states, got {value} at row {index}") \
    X(kStepOutside, kIndexError, "step must be in [0, {limit}), got {value} at row {index}") \
    X(kDraftStepOutside, kIndexError, \
      "current_draft_step must be in [0, {limit}), got {value} at row {index}") \
    X(kPositionOutside, kIndexError, "positions must be in [0, {limit}), got {value} at token {index}") \
    X(kPositionBelow, kIndexError, "positions must be at least {limit}, got {value} at row {index}") \
    X(kBlocksSplitRuns, kValueError, \
      "block_sizes must be multiples of cp_interleave ({limit}) in groups that the ranks share, got " \
      "{value} in group {index}") \
    X(kStateSlots, kIndexError, "state_slots[{index}] must be below {limit} (num_slots), got {value}") \
    X(kStateSlotsTwice, kValueError, \
      "state_slots must name a slot for one request only, got {value} for request {limit} and request " \
      "{index}") \
    X(kWindowPastRecord, kValueError, \
      "query_start_loc must give a request no more than the {limit} tokens that a record holds, got " \
      "{value} for request {index}") \
    X(kNumKept, kValueError, \
      "num_kept[{index}] must be from 1 to the {limit} tokens of the request's last window, got {value}") \
    X(kCursorRing, kValueError, \
      "cursors must name a first row below {limit} of a ring, got {value} in slot {index}") \
    X(kCursorRows, kValueError, \
      "cursors must have from 0 to {limit} rows pending in a slot, got {value} in slot {index}") \
    X(kCursorHalf, kValueError, \
      "cursors must name half 0 or {limit} of a record, got {value} in slot {index}") \
    X(kFoldSourceSlots, kIndexError, "source_slots[{index}] must be below {limit} (num_slots), got {value}") \
    X(kFoldTargetSlots, kIndexError, "target_slots[{index}] must be below {limit} (num_slots), got {value}") \
    X(kFoldTargetTwice, kValueError, \
      "target_slots must name a slot that no other entry reads or writes, got {value} in entry {index}, " \
      "which entry {limit} has too") \
    X(kBlockRequest, kIndexError, \
      "idx_mapping[{index}] must be below the {limit} rows of block_tables, got {value}") \
    X(kBlockColumn, kIndexError, \
      "block_tables must have a column for each block, got {limit} columns where request {index} has " \
      "block {value}") \
    X(kBlockSlot, kIndexError, \
      "block_tables must have blocks below {limit} (num_slots), got {value} for request {index}") \
    X(kBlockTwice, kValueError, \
      "block_tables must name a target that no other request reads or writes, got block {value} in " \
      "entry {index}, which entry {limit} has too") \
    X(kPlanSlots, kIndexError, "plan must name slots in [1, {limit}), got {value} in row {index}") \
    X(kPlanSlotTwice, kValueError, \
      "plan must name a target that no other row reads or writes, got {value} in row {index}, which row " \
      "{limit} has too") \
    X(kPlanRows, kValueError, \
      "plan must reapply from 0 to the {limit} rows of a record, got {value} in row {index}") \
    X(kPlanHalf, kValueError, "plan must name half 0 or {limit} of a record, got {value} in row {index}") \
    X(kPlanRing, kValueError, \
      "plan must name a first row below {limit} of a ring, got {value} in row {index}") \
    X(kPlanChunkTarget, kValueError, \
      "plan must store in the slot {limit} that it reads with chunk, got {value} in row {index}") \
    X(kPlanChunkStore, kValueError, \
      "plan must have at least {limit} rows to store with chunk, got {value} in row {index}") \
    X(kPlanChunkRows, kValueError, \
      "plan must store a state with {limit} rows or more with chunk, got {value} in row {index}") \
    X(kTokensPastQueries, kValueError, \
      "q must have a row for every token, got {limit} where request {index} ends at token {value}")
// clang-format on

#define NWOR_PROBLEM(problem, error, text) problem,
enum Problem { kNoProblem, NWOR_PROBLEMS(NWOR_PROBLEM) };
#undef NWOR_PROBLEM

// The first problem of a row: its index, the invalid value, and the limit.
struct Found {
    int problem;
    int64_t index, value, limit;

    NWOR_HOST_DEVICE explicit operator bool() const { return problem != kNoProblem; }
};

enum PythonError { kValueError, kIndexError };

struct Wording {
    PythonError error;
    const char* text;
};

#define NWOR_WORDING(problem, error, text) {error, text},
constexpr Wording kWordings[] = {{kValueError, ""}, NWOR_PROBLEMS(NWOR_WORDING)};
#undef NWOR_WORDING

[[noreturn]] inline void complain(const char* op, const Found& found) {
    const Wording& wording = kWordings[found.problem];
    std::string text = wording.text;
    const auto put = [&text](const std::string& name, int64_t number) {
        const size_t at = text.find(name);
        if (at != std::string::npos) text.replace(at, name.size(), std::to_string(number));
    };
    put("{index}", found.index);
    put("{value}", found.value);
    put("{limit}", found.limit);
    if (wording.error == kIndexError) fail<std::out_of_range>(op, text);
    fail(op, text);
}

}  // namespace nwor
