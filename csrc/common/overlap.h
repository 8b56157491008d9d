// The bytes that a tensor spans, and whether two tensors, or two elements of one, share any.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>
#include <initializer_list>
#include <optional>
#include <string>
#include <vector>

#include "argument.h"

namespace nwor {

struct Range {
    const char* begin;
    const char* end;
};

template <class T>
Range range_at(const T* data, int64_t count) {
    const char* begin = reinterpret_cast<const char*>(data);
    return {begin, begin + count * static_cast<int64_t>(sizeof(T))};
}

// The bytes from the first to the last element of a strided view. Strides of torch views are never negative,
// so the first element has the lowest address.
inline Range range_of(const Tensor& tensor) {
    const char* begin = static_cast<const char*>(tensor.data_ptr());
    if (tensor.numel() == 0) return {begin, begin};
    const auto sizes = tensor.sizes(), strides = tensor.strides();
    int64_t last = 0;
    for (size_t i = 0; i < sizes.size(); ++i) last += (sizes[i] - 1) * strides[i];
    return {begin, begin + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

// Checks a written tensor: no two of its elements may share memory, as they do after `expand`. A view passes
// if each stride is larger than the span of all smaller strides, as in slices and permutations. Other views
// are refused even if their elements are apart.
inline void check_elements_apart(const Argument& a) {
    if (a.tensor.numel() == 0) return;
    const auto sizes = a.tensor.sizes(), strides = a.tensor.strides();
    for (size_t i = 0; i < sizes.size(); ++i) {
        int64_t span = 0;
        for (size_t j = 0; j < sizes.size(); ++j)
            if (strides[j] < strides[i] || (strides[j] == strides[i] && j < i))
                span += (sizes[j] - 1) * strides[j];
        if (sizes[i] == 1 || strides[i] > span) continue;
        std::string text;
        for (const int64_t stride : strides) text += (text.empty() ? "" : ", ") + std::to_string(stride);
        fail(a.op, a.name, " must not overlap itself, got ", describe(a.tensor), " with strides [", text,
             "]");
    }
}

// Finds whether two strided views share a byte. Key and value packed in one row, or in one page, span the
// same addresses but share no byte. The result is exact unless the search takes more than 4096 steps: then
// the views count as overlapping. Two views share a byte if the distance of their starts is a sum of
// multiples of their strides. The search goes through the strides from the largest to the smallest. It tries
// only multiples whose remainder the smaller strides can still cover. For views of nested dimensions these
// are one or two per stride.
class OverlapSearch {
  public:
    OverlapSearch(const Tensor& a, const Tensor& b)
        : size_a_(static_cast<int64_t>(a.element_size())), size_b_(static_cast<int64_t>(b.element_size())) {
        add_dimensions(a, size_a_, 1);
        add_dimensions(b, size_b_, -1);
        std::sort(terms_.begin(), terms_.begin() + num_terms_,
                  [](const Term& x, const Term& y) { return x.stride > y.stride; });
        least_[num_terms_] = 1 - size_b_;
        most_[num_terms_] = size_a_ - 1;
        for (size_t i = num_terms_; i-- > 0;) {
            least_[i] = least_[i + 1] + terms_[i].least * terms_[i].stride;
            most_[i] = most_[i + 1] + terms_[i].most * terms_[i].stride;
        }
    }

    // `distance`: from the start of a to the start of b, in bytes.
    bool may_share_memory(int64_t distance) { return search(0, distance); }

  private:
    struct Term {
        int64_t stride, least, most;  // the multiples of a stride that an index difference can make
    };

    void add_dimensions(const Tensor& tensor, int64_t element_size, int sign) {
        if (tensor.dim() > kMostDimensions)
            fail("nwor", "a tensor of ", tensor.dim(), " dimensions is compared for shared memory");
        for (int64_t i = 0; i < tensor.dim(); ++i) {
            const int64_t last = tensor.size(i) - 1, stride = tensor.stride(i) * element_size;
            if (last < 1 || stride == 0) continue;
            Term* term = nullptr;
            for (size_t known = 0; known < num_terms_; ++known)
                if (terms_[known].stride == stride) term = &terms_[known];
            if (term == nullptr) {
                term = &terms_[num_terms_++];
                *term = Term{stride, 0, 0};
            }
            (sign > 0 ? term->most : term->least) += sign * last;
        }
    }

    bool search(size_t i, int64_t distance) {
        if (distance < least_[i] || distance > most_[i]) return false;
        if (i == num_terms_ || ++visited_ > kMostVisited) return true;
        const Term& term = terms_[i];
        const auto floor = [&](int64_t x) { return x / term.stride - (x % term.stride < 0); };
        const int64_t first = std::max(term.least, -floor(most_[i + 1] - distance));
        const int64_t last = std::min(term.most, floor(distance - least_[i + 1]));
        for (int64_t multiple = first; multiple <= last; ++multiple)
            if (search(i + 1, distance - multiple * term.stride)) return true;
        return false;
    }

    // Views that need more steps than this count as overlapping.
    static constexpr int kMostVisited = 4096;
    static constexpr int kMostDimensions = 5;  // of any argument that is checked
    int64_t size_a_, size_b_;
    int visited_ = 0;
    size_t num_terms_ = 0;
    std::array<Term, 2 * kMostDimensions> terms_;
    std::array<int64_t, 2 * kMostDimensions + 1> least_,
        most_;  // range of the sum of the terms from i on, within an element
};

// An argument and its address range, for comparison with several others.
struct Placed {
    const char* name;
    const Tensor& tensor;
    Range range;

    Placed(const char* name, const Tensor& tensor, Range range) : name(name), tensor(tensor), range(range) {}
    Placed(const char* name, const Tensor& tensor) : Placed(name, tensor, range_of(tensor)) {}
    Placed(const Argument& a) : Placed(a.name, a.tensor) {}
};

inline void must_not_overlap(const char* op, const Placed& a, const Placed& b) {
    if (a.range.begin >= b.range.end || b.range.begin >= a.range.end) return;
    if (OverlapSearch(a.tensor, b.tensor).may_share_memory(b.range.begin - a.range.begin))
        fail(op, a.name, " and ", b.name, " must not share memory");
}

// Checks that no output shares memory with itself, an input or another output.
template <class Inputs = std::initializer_list<Argument>, class Outputs = std::initializer_list<Argument>>
void check_memory(const char* op, const Inputs& inputs, const Outputs& outputs) {
    std::vector<Placed> placed;  // inputs, then outputs
    placed.reserve(inputs.size() + outputs.size());
    for (const Argument& input : inputs) placed.emplace_back(input);
    for (const Argument& output : outputs) {
        check_elements_apart(output);
        placed.emplace_back(output);
    }
    for (size_t i = inputs.size(); i < placed.size(); ++i)
        for (size_t j = 0; j < i; ++j) must_not_overlap(op, placed[i], placed[j]);
}

// The same, and that all are on the device of the first.
template <class Inputs = std::initializer_list<Argument>, class Outputs = std::initializer_list<Argument>>
void check_placement(const char* op, const Inputs& inputs, const Outputs& outputs) {
    for (const Argument& a : inputs) a.same_device(inputs.begin()->tensor);
    for (const Argument& a : outputs) a.same_device(inputs.begin()->tensor);
    check_memory(op, inputs, outputs);
}

// Adds an optional argument to those of a check.
inline void add_given(std::vector<Argument>& arguments, const char* op, const char* name,
                      const std::optional<Tensor>& tensor) {
    if (tensor.has_value()) arguments.push_back({op, name, *tensor});
}

// Returns whether two tensors have the same address, number of dimensions and strides. Sizes are not
// compared.
inline bool same_start_and_strides(const Tensor& a, const Tensor& b) {
    if (a.data_ptr() != b.data_ptr() || a.dim() != b.dim()) return false;
    for (int64_t i = 0; i < a.dim(); ++i)
        if (a.stride(i) != b.stride(i)) return false;
    return true;
}

}  // namespace nwor
