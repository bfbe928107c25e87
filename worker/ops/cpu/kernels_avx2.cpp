// The kernels for x86 with AVX2, FMA and F16C.
#include "kernels.h"
#if defined(__x86_64__)
#define WITH_AVX2
#pragma GCC target("avx2,fma,f16c")
#include <immintrin.h>

namespace {
#include "kernels.inc"
}  // namespace

const Kernels kAvx2 = {"avx2", linear, sum, quantize, norm, swiglu, write, attend};

#endif
