// Invalid data, with one message per case. The CPU kernels check before they write, and raise. A CUDA kernel
// stores it in a record, which debug mode raises.
#pragma once

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <stdexcept>
#include <string>

#include "argument.h"

namespace nwor {

enum Problem {
    kNoProblem,
    // Slots and rows.
    kSlotMapping,
    kRowSlots,
    kSrcSlots,
    kDstSlots,
    kLogRows,
    kStageRows,
    kPageOffsets,
    // Counts of tokens and drafts.
    kQueriesDecrease,
    kDraftsDecrease,
    kDraftStartsFirst,
    kDraftStartsDecrease,
    kMoreDraftsThanTokens,
    kDraftPastTokens,
    kMoreDraftsThanRows,
    kMoreDraftsThanColumns,
    kMoreDraftsThanIds,
    kMoreDraftsThanMarks,
    kMoreDraftsThanFlags,
    // Redirected pages.
    kWindowTokens,
    kWindowRows,
    kWindowState,
    kWindowPosition,
    kWindowMapping,
    kWindowPages,
    kWindowColumns,
    kWindowShadow,
    kWindowRowSlot,
    kWindowMappedSlot,
    kWindowSavedSlot,
    // Rows of a drafter.
    kTargetQueriesDecrease,
    kTokensPastTarget,
    kTokensPastPositions,
    kTokensPastFlags,
    kTokensPastIds,
    kTokensPastHidden,
    kTokensPastSlots,
    kTokensPastMappings,
    kRealAfterPadded,
    kStateOutside,
    kStepOutside,
    kDraftStepOutside,
    kPositionOutside,
    kPositionBelow,
    kBlocksSplitRuns,
    // Recurrent states.
    kStateSlots,
    kStateSlotsTwice,
    kWindowPastRecord,
    kNumKept,
    kCursorRing,
    kCursorRows,
    kCursorHalf,
    kFoldSourceSlots,
    kFoldTargetSlots,
    kFoldTargetTwice,
    kBlockRequest,
    kBlockColumn,
    kBlockSlot,
    kBlockTwice,
    kPlanSlots,
    kPlanSlotTwice,
    kPlanRows,
    kPlanHalf,
    kPlanRing,
    kPlanChunkTarget,
    kPlanChunkStore,
    kPlanChunkRows,
    kTokensPastQueries,
    kNumProblems
};

// The first problem of a row: its index, the invalid value, and the limit.
struct Found {
    int problem;
    int64_t index, value, limit;

    NWOR_HOST_DEVICE explicit operator bool() const { return problem != kNoProblem; }
};

enum PythonError { kValueError, kIndexError };

struct Wording {
    Problem problem;
    PythonError error;
    const char* text;
};

constexpr Wording kWordings[] = {
    {kSlotMapping, kIndexError,
     "slot_mapping[{index}] must be below {limit} (num_blocks * block_size), got {value}"},
    {kRowSlots, kIndexError,
     "row_slots[{index}] must be below {limit} (num_blocks * block_size), got {value}"},
    {kSrcSlots, kIndexError,
     "src_slots[{index}] must be below {limit} (num_blocks * block_size), got {value}"},
    {kDstSlots, kIndexError,
     "dst_slots[{index}] must be below {limit} (num_blocks * block_size), got {value}"},
    {kLogRows, kIndexError, "log_rows[{index}] must be below the {limit} rows of the log, got {value}"},
    {kStageRows, kIndexError,
     "stage_rows[{index}] must be below the {limit} rows of the staging buffer, got {value}"},
    {kPageOffsets, kIndexError,
     "page_offsets must lie within the storage of the cache ({limit} elements), got offset {value}"},
    {kQueriesDecrease, kValueError,
     "query_start_loc must start at 0 or above and not decrease, got {limit} and {value} around request "
     "{index}"},
    {kDraftsDecrease, kValueError,
     "cu_num_draft_tokens must not decrease, got {value} at request {index} after {limit}"},
    {kDraftStartsFirst, kValueError, "draft_start_loc must begin with 0, got {value}"},
    {kDraftStartsDecrease, kValueError,
     "draft_start_loc must not decrease, got {limit} and {value} around request {index}"},
    {kMoreDraftsThanTokens, kValueError,
     "cu_num_draft_tokens must give a request no more drafts than tokens, got {value} drafts in the {limit} "
     "tokens of request {index}"},
    {kDraftPastTokens, kValueError,
     "slot_mappings must cover every draft, got {limit} tokens where request {index} ends at token {value}"},
    {kMoreDraftsThanRows, kValueError,
     "row_slots must have a row for each draft, got {limit} rows for {value} drafts"},
    {kMoreDraftsThanColumns, kValueError,
     "sampled_token_ids must have a column for each draft, got {limit} columns for the {value} drafts of "
     "request {index}"},
    {kMoreDraftsThanIds, kValueError,
     "draft_start_loc must not exceed the {limit} entries of draft_token_ids, got {value}"},
    {kMoreDraftsThanMarks, kValueError,
     "draft_start_loc must not exceed num_draft_tokens ({limit}), got {value}"},
    {kMoreDraftsThanFlags, kValueError,
     "draft_start_loc must not exceed the {limit} rows of row_rejected, got {value}"},
    {kWindowTokens, kValueError,
     "query_start_loc must give each request its drafts among the {limit} tokens, got the end {value} for "
     "request {index}"},
    {kWindowRows, kValueError,
     "draft_start_loc must not exceed the {limit} rows of the window, got {value} at request {index}"},
    {kWindowState, kIndexError,
     "idx_mapping must be in [0, {limit}) for a request with drafts, got {value} for request {index}"},
    {kWindowPosition, kValueError,
     "row_slots must have the offset in its page that the position of a draft has, got slot {value} at "
     "position {limit} of request {index}"},
    {kWindowMapping, kValueError,
     "slot_mappings must have the offset in its page that the position of a token has, and no slot for a "
     "draft "
     "without one in row_slots, got slot {value} at position {limit} of request {index}"},
    {kWindowPages, kValueError,
     "shadow_blocks must have a page for each page that a request's drafts touch, got {limit} pages where "
     "request {index} needs {value}"},
    {kWindowColumns, kIndexError,
     "block_tables must have a column for every page, got {limit} columns where request {index} has page "
     "{value}"},
    {kWindowShadow, kIndexError, "shadow_blocks must be in [0, {limit}), got {value} for request {index}"},
    {kWindowRowSlot, kIndexError, "row_slots must be below {limit}, got {value} for request {index}"},
    {kWindowMappedSlot, kIndexError, "slot_mappings must be below {limit}, got {value} for request {index}"},
    {kWindowSavedSlot, kIndexError, "saved_slots must be below {limit}, got {value} for request {index}"},
    {kTargetQueriesDecrease, kValueError,
     "target_query_start_loc must start at 0 or above and not decrease, got {limit} and {value} around "
     "request {index}"},
    {kTokensPastTarget, kValueError,
     "target_input_ids and target_positions must cover every token, got {limit} where request {index} ends "
     "at "
     "token {value}"},
    {kTokensPastPositions, kValueError,
     "positions must cover every token, got {limit} where request {index} ends at token {value}"},
    {kTokensPastFlags, kValueError,
     "positions and is_rejected must cover every token, got {limit} where request {index} ends at token "
     "{value}"},
    {kTokensPastIds, kValueError,
     "input_ids must hold every token, got {limit} places where request {index} ends at token {value}"},
    {kTokensPastHidden, kValueError,
     "hidden_state_mapping must hold every token, got {limit} places where request {index} ends at token "
     "{value}"},
    {kTokensPastSlots, kValueError,
     "slot_mapping must hold every token, got {limit} places where request {index} ends at token {value}"},
    {kTokensPastMappings, kValueError,
     "slot_mappings must hold every token, got {limit} places where request {index} ends at token {value}"},
    {kRealAfterPadded, kValueError,
     "idx_mapping must have its negative entries last, got {value} at row {index} after a negative one"},
    {kStateOutside, kIndexError,
     "idx_mapping must be below {limit}, the number of request states, got {value} at row {index}"},
    {kStepOutside, kIndexError, "step must be in [0, {limit}), got {value} at row {index}"},
    {kDraftStepOutside, kIndexError,
     "current_draft_step must be in [0, {limit}), got {value} at row {index}"},
    {kPositionOutside, kIndexError, "positions must be in [0, {limit}), got {value} at token {index}"},
    {kPositionBelow, kIndexError, "positions must be at least {limit}, got {value} at row {index}"},
    {kBlocksSplitRuns, kValueError,
     "block_sizes must be multiples of cp_interleave ({limit}) in groups that the ranks share, "
     "got {value} in group {index}"},
    {kStateSlots, kIndexError, "state_slots[{index}] must be below {limit} (num_slots), got {value}"},
    {kStateSlotsTwice, kValueError,
     "state_slots must name a slot for one request only, got {value} for request {limit} and request "
     "{index}"},
    {kWindowPastRecord, kValueError,
     "query_start_loc must give a request no more than the {limit} tokens that a record holds, got {value} "
     "for request {index}"},
    {kNumKept, kValueError,
     "num_kept[{index}] must be from 1 to the {limit} tokens of the request's last window, got {value}"},
    {kCursorRows, kValueError,
     "cursors must have from 0 to {limit} rows pending in a slot, got {value} in slot {index}"},
    {kCursorHalf, kValueError,
     "cursors must name half 0 or {limit} of a record, got {value} in slot {index}"},
    {kCursorRing, kValueError,
     "cursors must name a first row below {limit} of a ring, got {value} in slot {index}"},
    {kFoldSourceSlots, kIndexError, "source_slots[{index}] must be below {limit} (num_slots), got {value}"},
    {kFoldTargetSlots, kIndexError, "target_slots[{index}] must be below {limit} (num_slots), got {value}"},
    {kFoldTargetTwice, kValueError,
     "target_slots must name a slot that no other entry reads or writes, got {value} in entry {index}, which "
     "entry {limit} has too"},
    {kBlockRequest, kIndexError,
     "idx_mapping[{index}] must be below the {limit} rows of block_tables, got {value}"},
    {kBlockColumn, kIndexError,
     "block_tables must have a column for each block, got {limit} columns where request {index} has block "
     "{value}"},
    {kBlockSlot, kIndexError,
     "block_tables must have blocks below {limit} (num_slots), got {value} for request {index}"},
    {kBlockTwice, kValueError,
     "block_tables must name a target that no other request reads or writes, got block {value} in entry "
     "{index}, which entry {limit} has too"},
    {kPlanSlots, kIndexError, "plan must name slots in [1, {limit}), got {value} in row {index}"},
    {kPlanSlotTwice, kValueError,
     "plan must name a target that no other row reads or writes, got {value} in row {index}, which row "
     "{limit} has too"},
    {kPlanRows, kValueError,
     "plan must reapply from 0 to the {limit} rows of a record, got {value} in row {index}"},
    {kPlanHalf, kValueError, "plan must name half 0 or {limit} of a record, got {value} in row {index}"},
    {kPlanRing, kValueError,
     "plan must name a first row below {limit} of a ring, got {value} in row {index}"},
    {kPlanChunkTarget, kValueError,
     "plan must store in the slot {limit} that it reads with chunk, got {value} in row {index}"},
    {kPlanChunkStore, kValueError,
     "plan must have at least {limit} rows to store with chunk, got {value} in row {index}"},
    {kPlanChunkRows, kValueError,
     "plan must store a state with {limit} rows or more with chunk, got {value} in row {index}"},
    {kTokensPastQueries, kValueError,
     "q must have a row for every token, got {limit} where request {index} ends at token {value}"},
};
static_assert(std::size(kWordings) == kNumProblems - 1, "each problem has one wording");

[[noreturn]] inline void complain(const char* op, const Found& found) {
    const Wording& wording = *std::find_if(std::begin(kWordings), std::end(kWordings),
                                           [&](const Wording& w) { return w.problem == found.problem; });
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
