// Registers the ops of a family, once for every device.
#pragma once

#include <vector>

#include "bound.h"
#include "stable.h"

namespace nwor {

template <class... Others>
const Tensor& first_of(const Tensor& tensor, const Others&...) {
    return tensor;
}
template <class... Others>
const Tensor& first_of(const std::vector<Tensor>& tensors, const Others&...) {
    return tensors[0];
}

// An op consists of `check` and `run`. The parameters of `check` are those of the op's schema. It returns the
// arguments for `run(arguments, device)`, a function of the file that registers the op. `Device` is a type of
// that file, so the call finds this `run` and not one of another device.
template <class Device, const char* op, auto check>
struct Op;

template <class Device, const char* op, class Arguments, class... Parameters,
          Arguments (*check)(const char*, Parameters...)>
struct Op<Device, op, check> {
    static auto call(Parameters... parameters) {
        const Arguments arguments = check(op, parameters...);
        return run(arguments, Device(first_of(parameters...)));
    }
    static Tensor bind(Parameters... parameters, const std::optional<Tensor>& after,
                       const std::optional<Tensor>& begun) {
        using Call = BoundCallOf<Device, Arguments, std::decay_t<Parameters>...>;
        return bound_handle(
            op, std::make_shared<Call>(op, check(op, parameters...), first_of(parameters...), parameters...),
            after, begun);
    }
};

#define NWOR_OP(library, name, check)                                           \
    do {                                                                        \
        static constexpr char op_name[] = #name;                                \
        library.impl(op_name, TORCH_BOX((&Op<Device, op_name, &check>::call))); \
    } while (false)

// An op that can be bound; see bound.h.
#define NWOR_BINDABLE_OP(library, name, check)                                         \
    do {                                                                               \
        NWOR_OP(library, name, check);                                                 \
        static constexpr char op_name[] = #name;                                       \
        library.impl("_bind_" #name, TORCH_BOX((&Op<Device, op_name, &check>::bind))); \
    } while (false)

}  // namespace nwor
