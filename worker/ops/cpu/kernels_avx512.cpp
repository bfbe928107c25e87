// The kernels for x86 with AVX-512 and VNNI.
#include "kernels.h"
#if defined(__x86_64__)
#define WITH_AVX512
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,prefer-vector-width=512")
#include <immintrin.h>

namespace {
#include "kernels.inc"
}  // namespace

const Kernels kAvx512 = {"avx512", linear, sum, quantize, norm, swiglu, write, attend};

#endif
