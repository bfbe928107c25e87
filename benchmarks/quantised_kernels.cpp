// The loops of quantised_kernels.py in C++: y = x W^T from blocks of 32 weights, 16 rows of W at a
// time, one lane of a vector each. Activations are float32; a sum runs in one order for any m.
// g++ -O3 -march=native -fopenmp -shared -fPIC

#include <cstdint>
#include <cstring>

namespace {

constexpr int kLanes = 16;

// A float16 that is no infinity or nan, exactly.
inline float half(uint32_t bits) {
  const uint32_t shifted = ((bits & 0x7fff) << 13) | ((bits & 0x8000) << 16);
  float value;
  std::memcpy(&value, &shifted, sizeof value);
  return value * 0x1p112f;
}

// words: [blocks][5][16]: float16 scale (low) and minimum (high), then eight weights a word.
struct Q41 {
  static constexpr int rows = 5, each = 8;
  static float weight(uint32_t word, int i) {
    return static_cast<float>(static_cast<int32_t>((word >> (4 * i)) & 15));
  }
};

// words: [blocks][9][16]: float16 scale, then four signed weights a word.
struct Q80 {
  static constexpr int rows = 9, each = 4;
  static float weight(uint32_t word, int i) {
    return static_cast<float>(static_cast<int32_t>(word << (24 - 8 * i)) >> 24);
  }
};

template <class Format, int M>
void tile(const uint32_t* __restrict words, const float* __restrict x,
          const float* __restrict sums, float* __restrict y, int64_t n, int64_t k) {
  const int64_t blocks = k / 32;
  float total[M][kLanes] = {};
  for (int64_t b = 0; b < blocks; ++b) {
    const uint32_t* block = words + b * Format::rows * kLanes;
    float part[M][kLanes] = {};
    for (int c = 1; c < Format::rows; ++c) {
      const float* at = x + b * 32 + (c - 1) * Format::each;
      const uint32_t* row = block + c * kLanes;
#pragma GCC unroll 8
      for (int i = 0; i < Format::each; ++i) {
        float weight[kLanes];
        for (int r = 0; r < kLanes; ++r) weight[r] = Format::weight(row[r], i);
#pragma GCC unroll 8
        for (int j = 0; j < M; ++j)
          for (int r = 0; r < kLanes; ++r) part[j][r] += weight[r] * at[j * k + i];
      }
    }
    for (int j = 0; j < M; ++j)
      for (int r = 0; r < kLanes; ++r) {
        total[j][r] += half(block[r] & 0xffff) * part[j][r];
        if (Format::rows == 5) total[j][r] += half(block[r] >> 16) * sums[j * blocks + b];
      }
  }
  for (int j = 0; j < M; ++j)
    for (int r = 0; r < kLanes; ++r) y[j * n + r] = total[j][r];
}

template <class Format>
void product(const uint32_t* words, const float* x, const float* sums, float* y, int64_t n,
             int64_t k, int64_t m, int threads) {
  const int64_t blocks = k / 32;
#pragma omp parallel for schedule(static) num_threads(threads)
  for (int64_t g = 0; g < n / kLanes; ++g) {
    const uint32_t* group = words + g * blocks * Format::rows * kLanes;
    int64_t j = 0;
    for (; j + 8 <= m; j += 8)
      tile<Format, 8>(group, x + j * k, sums + j * blocks, y + j * n + g * kLanes, n, k);
    for (; j + 4 <= m; j += 4)
      tile<Format, 4>(group, x + j * k, sums + j * blocks, y + j * n + g * kLanes, n, k);
    for (; j < m; ++j)
      tile<Format, 1>(group, x + j * k, sums + j * blocks, y + j * n + g * kLanes, n, k);
  }
}

}  // namespace

extern "C" {

void q4_1(const uint32_t* words, const float* x, const float* sums, float* y, int64_t n, int64_t k,
          int64_t m, int threads) {
  product<Q41>(words, x, sums, y, n, k, m, threads);
}

void q8_0(const uint32_t* words, const float* x, const float* sums, float* y, int64_t n, int64_t k,
          int64_t m, int threads) {
  product<Q80>(words, x, sums, y, n, k, m, threads);
}
}
