// What the kernels of every instruction set compute, and the formats they read.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <utility>

// A weight [rows, cols] as the kernels read it: groups of 16 rows, the rows of a group side by side
// as the lanes of a vector. The last group is filled up with rows of zeros. The codes of a block of
// 32 columns are words of 32 bits a row: 8 codes of 4 bits or 4 of 8, the first one lowest.
// A weight is scale · code + minimum, where both are a row's in 32 columns (16 for kK6); codes of
// kN8 have a sign.
enum Format : int32_t {
  kF32,   // [cols][16] float32
  kF16,   // [cols][16] float16
  kBF16,  // [cols][16] bfloat16
  kN4,    // a block: float16 scale[16], minimum[16]; words [4][16]         (Q4_0, Q4_1)
  kN8,    // a block: float16 scale[16], minimum[16]; words [8][16]         (Q5_0, Q5_1, Q8_0)
  kK4,    // 8 blocks: float16 d[16], dmin[16]; 8 × (uint8 scale[16], minimum[16]; words [4][16])
  kK8,    // likewise with words [8][16]                                    (Q4_K; Q5_K)
  kK6,    // 8 blocks: float16 d[16]; 8 × (int8 scale[2][16]; words [8][16])              (Q6_K)
};

struct Matrix {
  int32_t format, rows, cols;
  int32_t first;  // its first row's number in the layer that it is a part of
  const uint8_t* data;
  const float* bias;  // [rows], or null
};

struct Linear {  // parts of one format each, [rows, cols] together
  Matrix parts[3];
  int32_t count, rows, cols, reserved;
};

// y [m, width] at the weight's columns = x [m, cols] · weightᵀ + bias + residual. `residual`
// [m, width] may be null or y.
struct LinearJob {
  const Matrix* weight;
  const float* x;
  const float* residual;
  float* y;
  int m, width;
  // For weights in blocks, the sums of x, or of what int8 activations stand for: [m][cols / 16].
  const float* sums;
  // With int8 activations: codes [m][cols] (evens before odds in eights for words of 4 bits) and
  // scale [m][cols / 32]; else null.
  const int8_t* codes;
  const float* scales;
};

struct SumsJob {  // sums [m][cols / 16] of a LinearJob
  const float* x;
  int cols;
  float* sums;
};

struct QuantizeJob {  // int8 activations of a LinearJob
  const float* x;
  int cols;
  bool in_halves;
  int8_t* codes;
  float* scales;
  float* sums;
};

struct NormJob {  // y [m, cols] = x / rms(x) · weight, rows `stride` apart in both
  const float* x;
  const float* weight;
  float* y;
  int cols, x_stride, y_stride;
  float eps;
};

struct SwigluJob {  // y [m, inner] = silu(x[:, :inner]) · x[:, inner:]
  const float* x;
  float* y;
  int inner;
};

// Attention of a step over one layer of the cache [blocks, 2, kv_heads, block_size · head_dim], of
// which keys are [head_dim, block_size] and values [block_size, head_dim].
struct AttentionJob {
  float* qkv;  // [T, (heads + 2 · kv_heads) · head_dim]; queries and keys are rotated in place
  float* out;  // [T, heads · head_dim]
  void* cache;
  const float* cos;  // [positions, head_dim] each; sin has the sign of the rotation
  const float* sin;
  const float* query_norm;  // [head_dim] or null
  const float* key_norm;
  const int32_t* positions;  // [T]
  const int32_t* slots;      // [T]
  const int32_t* query_starts;
  const int32_t* context_lens;
  const int32_t* block_tables;
  int32_t tokens, sequences, table_width, first_position;
  int32_t heads, kv_heads, head_dim, block_size, rotates, bfloat16, window;
  float eps;
  // Set by the caller: the parts of the job, four numbers each (sequence, KV head, first query and
  // how many).
  const int32_t* parts;
};

// A kernel computes the parts first..last-1 of a job: groups of rows, rows, or `parts`.
struct Kernels {
  const char* name;
  void (*linear)(const LinearJob&, int, int);
  void (*sum)(const SumsJob&, int, int);
  void (*quantize)(const QuantizeJob&, int, int);
  void (*norm)(const NormJob&, int, int);
  void (*swiglu)(const SwigluJob&, int, int);
  void (*write)(const AttentionJob&, int, int);
  void (*attend)(const AttentionJob&, int, int);
};

extern const Kernels kAvx512, kAvx2, kPortable;

static inline float half_to_float(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 31, part = half & 1023;
  uint32_t bits;
  float value;
  if (exponent == 0) {
    value = (float)part * 0x1p-24f;
    memcpy(&bits, &value, 4);
    bits |= sign;
  } else {
    bits = sign | (exponent == 31 ? 0x7f800000 : (exponent + 112) << 23) | part << 13;
  }
  memcpy(&value, &bits, 4);
  return value;
}
