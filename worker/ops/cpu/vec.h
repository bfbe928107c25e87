// Vectors of float32 for one instruction set. Included inside a namespace by each kernels_*.cpp,
// after the flags of that instruction set are in force.
//
// Every operation is one IEEE operation a lane, fused multiply-add included, so a sum has the same
// value whatever the width: what a kernel computes does not depend on the instruction set, as long
// as it fixes the order of its sums by lane.
#if defined(WITH_AVX512)

constexpr int W = 16;
using vf = __m512;
using vi = __m512i;
static inline vf load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, vf v) { _mm512_storeu_ps(p, v); }
static inline vf all(float x) { return _mm512_set1_ps(x); }
static inline vf fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf divide(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf max2(vf a, vf b) { return _mm512_max_ps(a, b); }  // b where either is NaN
static inline vf min2(vf a, vf b) { return _mm512_min_ps(a, b); }
static inline vi iload(const void* p) { return _mm512_loadu_si512(p); }
static inline vi iall(int32_t x) { return _mm512_set1_epi32(x); }
static inline vi iadd(vi a, vi b) { return _mm512_add_epi32(a, b); }
static inline vi iand(vi a, vi b) { return _mm512_and_si512(a, b); }
static inline vi ixor(vi a, vi b) { return _mm512_xor_si512(a, b); }
template <int N> static inline vi right(vi a) { return _mm512_srli_epi32(a, N); }
template <int N> static inline vi left(vi a) { return _mm512_slli_epi32(a, N); }
template <int N> static inline vi signed_right(vi a) { return _mm512_srai_epi32(a, N); }
static inline vf to_float(vi a) { return _mm512_cvtepi32_ps(a); }
static inline vi nearest(vf a) { return _mm512_cvtps_epi32(a); }
static inline vf as_float(vi a) { return _mm512_castsi512_ps(a); }
static inline vf halves(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
}
static inline vi shorts(const uint16_t* p) {
  return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p));
}
static inline vi bytes(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
}
static inline vi signed_bytes(const uint8_t* p) {
  return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p));
}
// The lowest 4 bits of each lane.
static inline vf nibble(vi a) {
  return _mm512_permutexvar_ps(a, _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
}
// acc + Σ of four products of an unsigned and a signed byte, a lane.
static inline vi dot4(vi acc, vi u, vi s) { return _mm512_dpbusd_epi32(acc, u, s); }

#elif defined(WITH_AVX2)

constexpr int W = 8;
using vf = __m256;
using vi = __m256i;
static inline vf load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, vf v) { _mm256_storeu_ps(p, v); }
static inline vf all(float x) { return _mm256_set1_ps(x); }
static inline vf fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf divide(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf max2(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline vf min2(vf a, vf b) { return _mm256_min_ps(a, b); }
static inline vi iload(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
static inline vi iall(int32_t x) { return _mm256_set1_epi32(x); }
static inline vi iadd(vi a, vi b) { return _mm256_add_epi32(a, b); }
static inline vi iand(vi a, vi b) { return _mm256_and_si256(a, b); }
static inline vi ixor(vi a, vi b) { return _mm256_xor_si256(a, b); }
template <int N> static inline vi right(vi a) { return _mm256_srli_epi32(a, N); }
template <int N> static inline vi left(vi a) { return _mm256_slli_epi32(a, N); }
template <int N> static inline vi signed_right(vi a) { return _mm256_srai_epi32(a, N); }
static inline vf to_float(vi a) { return _mm256_cvtepi32_ps(a); }
static inline vi nearest(vf a) { return _mm256_cvtps_epi32(a); }
static inline vf as_float(vi a) { return _mm256_castsi256_ps(a); }
static inline vf halves(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
}
static inline vi shorts(const uint16_t* p) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p));
}
static inline vi bytes(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline vi signed_bytes(const uint8_t* p) {
  return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p));
}
static inline vi dot4(vi acc, vi u, vi s) {
  const vi even = _mm256_set1_epi16(255);
  vi low = _mm256_madd_epi16(_mm256_and_si256(u, even), _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8));
  vi high = _mm256_madd_epi16(_mm256_srli_epi16(u, 8), _mm256_srai_epi16(s, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(low, high));
}

static inline vf nibble(vi a) { return to_float(iand(a, iall(15))); }

#else  // NEON, and whatever else the compiler has four lanes and a fused multiply-add for

constexpr int W = 4;
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));
static inline vf load(const float* p) { vf v; memcpy(&v, p, 16); return v; }
static inline void store(float* p, vf v) { memcpy(p, &v, 16); }
static inline vf all(float x) { return vf{x, x, x, x}; }
static inline vf add(vf a, vf b) { return a + b; }
static inline vf sub(vf a, vf b) { return a - b; }
static inline vf mul(vf a, vf b) { return a * b; }
static inline vf divide(vf a, vf b) { return a / b; }
static inline vf max2(vf a, vf b) { return a > b ? a : b; }
static inline vf min2(vf a, vf b) { return a < b ? a : b; }
static inline vi iload(const void* p) { vi v; memcpy(&v, p, 16); return v; }
static inline vi iall(int32_t x) { return vi{x, x, x, x}; }
static inline vi iadd(vi a, vi b) { return a + b; }
static inline vi iand(vi a, vi b) { return a & b; }
static inline vi ixor(vi a, vi b) { return a ^ b; }
template <int N> static inline vi right(vi a) {
  typedef uint32_t vu __attribute__((vector_size(16)));
  return (vi)((vu)a >> N);
}
template <int N> static inline vi signed_right(vi a) { return a >> N; }
template <int N> static inline vi left(vi a) { return a << N; }
static inline vf to_float(vi a) { return __builtin_convertvector(a, vf); }
static inline vf as_float(vi a) { return (vf)a; }
static inline vf nibble(vi a) { return to_float(iand(a, iall(15))); }

#if defined(__aarch64__)

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
