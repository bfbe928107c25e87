// Vectors of float32 for one instruction set. Included inside a namespace by each kernels_*.cpp,
// after the flags of that instruction set are in force.
//
// Every operation is one IEEE operation a lane, fused multiply-add included, so a sum has the same
// value whatever the width: what a kernel computes does not depend on the instruction set, as long
// as it fixes the order of its sums by lane.
#if defined(WITH_AVX512)
constexpr int W = 16;
#elif defined(WITH_AVX2)
constexpr int W = 8;
#else  // NEON, and whatever else the compiler has four lanes and a fused multiply-add for
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
static inline vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
static inline vf all(float x) { return x - vf{}; }  // a sum would lose the sign of -0
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf divide(vf a, vf b) { return a / b; }
static inline vf max2(vf a, vf b) { return a > b ? a : b; }  // b where either is NaN
static inline vf min2(vf a, vf b) { return a < b ? a : b; }
static inline vi iload(const void* p) { vi v; memcpy(&v, p, sizeof v); return v; }
static inline vi iall(int32_t x) { return x + vi{}; }
static inline vi iadd(vi a, vi b) { return a + b; }
static inline vi iand(vi a, vi b) { return a & b; }
static inline vi ixor(vi a, vi b) { return a ^ b; }
template <int N> static inline vi right(vi a) { return (vi)((vu)a >> N); }
template <int N> static inline vi left(vi a) { return a << N; }
template <int N> static inline vi signed_right(vi a) { return a >> N; }
static inline vf to_float(vi a) { return __builtin_convertvector(a, vf); }
static inline vf as_float(vi a) { return (vf)a; }

#if defined(WITH_AVX512)

static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vi nearest(vf a) { return (vi)_mm512_cvtps_epi32(a); }
static inline vf halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline vi shorts(const uint16_t* p) {
  return (vi)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
static inline vi bytes(const uint8_t* p) {
  return (vi)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
static inline vi signed_bytes(const uint8_t* p) {
  return (vi)_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
// The lowest 4 bits of each lane.
static inline vf nibble(vi a) {
  return _mm512_permutexvar_ps((__m512i)a, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
// acc + Σ of four products of an unsigned and a signed byte, a lane.
static inline vi dot4(vi acc, vi u, vi s) {
  return (vi)_mm512_dpbusd_epi32((__m512i)acc, (__m512i)u, (__m512i)s);
}

#else

static inline vf nibble(vi a) { return to_float(iand(a, iall(15))); }

#if defined(WITH_AVX2)

static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vi nearest(vf a) { return (vi)_mm256_cvtps_epi32(a); }
static inline vf halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline vi shorts(const uint16_t* p) {
  return (vi)_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
static inline vi bytes(const uint8_t* p) {
  return (vi)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline vi signed_bytes(const uint8_t* p) {
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline vi dot4(vi acc, vi u, vi s) {
  const __m256i unsigned_ = (__m256i)u, signed_ = (__m256i)s, even = _mm256_set1_epi16(255);
  __m256i low = _mm256_madd_epi16(_mm256_and_si256(unsigned_, even), _mm256_srai_epi16(_mm256_slli_epi16(signed_, 8), 8));
  __m256i high = _mm256_madd_epi16(_mm256_srli_epi16(unsigned_, 8), _mm256_srai_epi16(signed_, 8));
  return acc + (vi)_mm256_add_epi32(low, high);
}

#elif defined(__aarch64__)

static inline vf fma(vf a, vf b, vf c) {
  return (vf)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
}
static inline vi nearest(vf a) { return (vi)vcvtnq_s32_f32((float32x4_t)a); }
static inline vf halves(const uint16_t* p) {
  return (vf)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}
static inline vi shorts(const uint16_t* p) { return (vi)vmovl_u16(vld1_u16(p)); }
static inline uint8x8_t four_bytes(const uint8_t* p) {
  uint32_t four;
  memcpy(&four, p, 4);
  return vreinterpret_u8_u32(vdup_n_u32(four));
}
static inline vi bytes(const uint8_t* p) {
  return (vi)vmovl_u16(vget_low_u16(vmovl_u8(four_bytes(p))));
}
static inline vi signed_bytes(const uint8_t* p) {
  return (vi)vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_u8(four_bytes(p)))));
}
static inline vi dot4(vi acc, vi u, vi s) {  // no product is too large for 16 bits
  const uint8x16_t a = (uint8x16_t)u;
  const int8x16_t b = (int8x16_t)s;
  int16x8_t low = vmulq_s16((int16x8_t)vmovl_u8(vget_low_u8(a)), vmovl_s8(vget_low_s8(b)));
  int16x8_t high = vmulq_s16((int16x8_t)vmovl_high_u8(a), vmovl_high_s8(b));
  return acc + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
}

#else

static inline vf fma(vf a, vf b, vf c) {
  for (int i = 0; i < 4; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
  return c;
}
static inline vi nearest(vf a) {
  vi v;
  for (int i = 0; i < 4; i++) v[i] = (int32_t)__builtin_rintf(a[i]);
  return v;
}
static inline vf halves(const uint16_t* p) {
  vf v;
  for (int i = 0; i < 4; i++) v[i] = half_to_float(p[i]);
  return v;
}
static inline vi shorts(const uint16_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
static inline vi bytes(const uint8_t* p) { return vi{p[0], p[1], p[2], p[3]}; }
static inline vi signed_bytes(const uint8_t* p) {
  return vi{(int8_t)p[0], (int8_t)p[1], (int8_t)p[2], (int8_t)p[3]};
}
static inline vi dot4(vi acc, vi u, vi s) {
  for (int i = 0; i < 4; i++)
    for (int j = 0; j < 4; j++)
      acc[i] += (int32_t)(uint8_t)(u[i] >> 8 * j) * (int32_t)(int8_t)(s[i] >> 8 * j);
  return acc;
}

#endif
#endif
