// The kernels for NEON and whatever else has vectors of four lanes.
#if defined(__x86_64__)
#pragma GCC optimize("O1")  // hardly any such CPU lacks AVX2: a third of the time to compile this file
#endif
#include "kernels.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {
#include "kernels.inc"
}  // namespace

const Kernels kPortable = {"portable", linear, sum, quantize, norm, swiglu, write, attend};

