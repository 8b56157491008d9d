// Family recurrent: the launches of the chunk form, in `recurrent_chunk.cu`.
#pragma once

#include "../recurrent_fold.h"
#include "../recurrent_verify.h"

namespace nwor {

// `like`: a tensor on the device of the call.
void run_chunk(const VerifyArguments& c, const Tensor& like);
void run_chunk(const FoldArguments& f, const Tensor& like);

}  // namespace nwor
