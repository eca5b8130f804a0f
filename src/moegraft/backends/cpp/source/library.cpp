// The library of the cpp backend: plain C functions over the structures of library.py.
#include "layer.h"
#include "linear.h"

namespace {

// 0 = done, 1 = no memory.
template <class Run>
int64_t guarded(Run run) {
    try {
        run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}

}  // namespace

#pragma GCC visibility push(default)
extern "C" {

int64_t moegraft_layer(const LayerArguments* arguments) {
    return guarded([&] { run_layer_in_parts(*arguments); });
}

int64_t moegraft_linear_lora(const LinearArguments* arguments) {
    return guarded([&] { run_linear_lora(*arguments); });
}

// Bytes of the structures, which must agree with library.py.
int64_t moegraft_layer_bytes() { return sizeof(LayerArguments); }
int64_t moegraft_linear_bytes() { return sizeof(LinearArguments); }
}
#pragma GCC visibility pop
