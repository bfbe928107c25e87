// The kernels for NEON and whatever else has vectors of four lanes.
#include <cmath>
#include <cstring>
#include <utility>

#include "kernels.h"
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {
#include "vec.h"
#include "kernels.inc"
}  // namespace

const Kernels kPortable = {"portable", linear, sum, quantize, norm, swiglu, write, attend};

