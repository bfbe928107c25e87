// The functions that Python calls, by ctypes: weights repacked, and the steps of a layer in order.
//
// Shapes and dtypes are checked by the caller (native.py). Memory belongs to the caller but for
// what an engine needs between the steps of a layer. One call of an engine runs at a time.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <vector>

#include "kernels.h"
#include "pool.h"

// Null for instruction sets that the library was built without.
extern const Kernels kAvx512 __attribute__((weak)), kAvx2 __attribute__((weak)), kPortable __attribute__((weak));

namespace {

// ---- formats -------------------------------------------------------------------------------------

enum Ggml { F32 = 0, F16 = 1, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14, BF16 = 30 };

struct Type {  // of GGML: `elements` of a row take `bytes` in a file
  int type, format, elements, bytes;
};

constexpr Type kTypes[] = {
  {F32, kF32, 1, 4},     {F16, kF16, 1, 2},     {BF16, kBF16, 1, 2},     {Q4_0, kN4, 32, 18},
  {Q4_1, kN4, 32, 20},   {Q5_0, kN8, 32, 22},   {Q5_1, kN8, 32, 24},     {Q8_0, kN8, 32, 34},
  {Q4_K, kK4, 256, 144}, {Q5_K, kK8, 256, 176}, {Q6_K, kK6, 256, 210},
};

const Type& type_of(int number) {  // with the format -1 if it is none of ours
  static constexpr Type none = {-1, -1, 1, 0};
  for (const Type& type : kTypes)
    if (type.type == number) return type;
  return none;
}

struct Layout {  // of a group: every `span` columns have `head` bytes and 8 or 1 blocks of `block`
  int span, head, block, small, bits;
};

constexpr Layout kLayouts[] = {  // by format
  {1, 0, 64, 0, 32},      // kF32
  {1, 0, 32, 0, 16},      // kF16
  {1, 0, 32, 0, 16},      // kBF16
  {32, 64, 256, 0, 4},    // kN4
  {32, 64, 512, 0, 8},    // kN8
  {256, 64, 288, 32, 4},  // kK4
  {256, 64, 544, 32, 8},  // kK8
  {256, 32, 544, 32, 8},  // kK6
};

int64_t group_bytes(int format, int cols) {
  Layout layout = kLayouts[format];
  int blocks = layout.span == 256 ? 8 : 1;
  return (int64_t)cols / layout.span * (layout.head + blocks * layout.block);
}

uint16_t float_to_half(float value) {  // exact, or infinity where there is no such float16
  uint32_t bits;
  memcpy(&bits, &value, 4);
  uint16_t sign = bits >> 16 & 0x8000;
  float size = fabsf(value);
  if (size >= 65536.0f) return sign | 0x7c00;
  if (size < 0x1p-14f) return sign | (uint16_t)(size * 0x1p24f);
  return sign | (uint16_t)(((bits >> 23 & 255) - 112) << 10 | (bits >> 13 & 1023));
}

uint16_t load16(const uint8_t* p) {
  uint16_t value;
  memcpy(&value, p, 2);
  return value;
}

void put16(uint8_t* head, int place, uint16_t value) { memcpy(head + place * 2, &value, 2); }

void put_codes(uint8_t* words, int lane, const uint8_t* codes, int bits) {
  const int each = 32 / bits;
  for (int word = 0; word < bits; word++) {
    uint32_t value = 0;
    for (int i = 0; i < each; i++) value |= (uint32_t)codes[word * each + i] << bits * i;
    memcpy(words + (word * 16 + lane) * 4, &value, 4);
  }
}

// One block of 32 weights of a file with a float16 scale; false: a minimum that float16 cannot hold.
bool put_plain(int type, const uint8_t* src, uint8_t* dst, int lane) {
  const bool has_minimum = type == Q4_1 || type == Q5_1;
  const uint16_t scale = load16(src);
  const float zero = type == Q4_0 ? -8 : 0;
  uint16_t minimum = has_minimum ? load16(src + 2) : float_to_half(zero * half_to_float(scale));
  const uint8_t* body = src + (has_minimum ? 4 : 2);
  uint8_t codes[32];
  if (type == Q8_0) {
    memcpy(codes, body, 32);
  } else {
    uint32_t high = 0;
    if (type == Q5_0 || type == Q5_1) memcpy(&high, body, 4), body += 4;
    for (int i = 0; i < 32; i++)
      codes[i] = ((i < 16 ? body[i] & 15 : body[i - 16] >> 4) | (high >> i & 1) << 4) - (type == Q5_0 ? 16 : 0);
  }
  put16(dst, lane, scale);
  put16(dst, 16 + lane, minimum);
  put_codes(dst + 64, lane, codes, type_of(type).format == kN4 ? 4 : 8);
  return has_minimum || (minimum & 0x7c00) != 0x7c00 || (scale & 0x7c00) == 0x7c00;
}

void put_super(int type, const uint8_t* src, uint8_t* dst, int lane) {  // Q4_K, Q5_K: 256 weights
  put16(dst, lane, load16(src));
  put16(dst, 16 + lane, load16(src + 2));
  const uint8_t* packed = src + 4;
  const uint8_t* high = src + 16;
  const uint8_t* low = type == Q5_K ? high + 32 : high;
  const int bits = type == Q5_K ? 8 : 4, block_bytes = type == Q5_K ? 544 : 288;
  for (int block = 0; block < 8; block++) {
    uint8_t* out = dst + 64 + block * block_bytes;
    if (block < 4) {
      out[lane] = packed[block] & 63;
      out[16 + lane] = packed[block + 4] & 63;
    } else {
      out[lane] = (packed[block + 4] & 15) | (packed[block - 4] >> 6) << 4;
      out[16 + lane] = packed[block + 4] >> 4 | (packed[block] >> 6) << 4;
    }
    uint8_t codes[32];
    for (int i = 0; i < 32; i++) {
      codes[i] = low[block / 2 * 32 + i] >> block % 2 * 4 & 15;
      if (type == Q5_K) codes[i] |= (high[i] >> block & 1) << 4;
    }
    put_codes(out + 32, lane, codes, bits);
  }
}

void put_sixes(const uint8_t* src, uint8_t* dst, int lane) {  // Q6_K: 256 weights
  put16(dst, lane, load16(src + 208));
  for (int block = 0; block < 8; block++) {
    uint8_t* out = dst + 32 + block * 544;
    out[lane] = src[192 + block * 2];
    out[16 + lane] = src[192 + block * 2 + 1];
    const int half = block / 4, row = block % 4;
    uint8_t codes[32];
    for (int i = 0; i < 32; i++) {
      uint8_t low = src[half * 64 + (row & 1) * 32 + i];
      codes[i] = (row < 2 ? low & 15 : low >> 4) | (src[128 + half * 32 + i] >> 2 * row & 3) << 4;
    }
    put_codes(out + 32, lane, codes, 8);
  }
}

int64_t row_bytes(const Type& type, int cols) { return (int64_t)cols / type.elements * type.bytes; }

bool pack_row(int type, const uint8_t* src, uint8_t* group, int lane, int cols) {
  bool good = true;
  const Type& own = type_of(type);
  const Layout layout = kLayouts[own.format];
  if (layout.span == 1) {
    const int size = layout.bits / 8;
    for (int k = 0; k < cols; k++) memcpy(group + ((int64_t)k * 16 + lane) * size, src + (int64_t)k * size, size);
    return true;
  }
  const int64_t from = row_bytes(own, layout.span), to = group_bytes(own.format, layout.span);
  for (int k = 0; k < cols / layout.span; k++) {
    const uint8_t* in = src + k * from;
    uint8_t* out = group + k * to;
    if (type == Q6_K)
      put_sixes(in, out, lane);
    else if (layout.span == 256)
      put_super(type, in, out, lane);
    else
      good &= put_plain(type, in, out, lane);
  }
  return good;
}

void unpack_row(const Matrix& matrix, int row, float* out) {
  const Layout layout = kLayouts[matrix.format];
  const uint8_t* group = matrix.data + row / 16 * group_bytes(matrix.format, matrix.cols);
  const int lane = row % 16;
  for (int k = 0; k < matrix.cols; k++) {
    if (layout.span == 1) {
      const uint8_t* p = group + ((int64_t)k * 16 + lane) * (layout.bits / 8);
      uint32_t bits = 0;
      memcpy(&bits, p, layout.bits / 8);
      if (matrix.format == kF16) {
        out[k] = half_to_float((uint16_t)bits);
      } else {
        bits <<= matrix.format == kBF16 ? 16 : 0;
        memcpy(out + k, &bits, 4);
      }
      continue;
    }
    const uint8_t* head = group + (int64_t)(k / layout.span) * group_bytes(matrix.format, layout.span);
    const uint8_t* small = head + layout.head + k % layout.span / 32 * layout.block;
    const int place = k % 32, each = 32 / layout.bits;
    uint32_t word;
    memcpy(&word, small + layout.small + ((place / each) * 16 + lane) * 4, 4);
    float scale = half_to_float(load16(head + lane * 2)), minimum;
    if (matrix.format == kK6) {
      scale *= (int8_t)small[place / 16 * 16 + lane];
      minimum = -32.0f * scale;
    } else {
      minimum = half_to_float(load16(head + 32 + lane * 2));
      if (layout.small) scale *= small[lane], minimum *= -(float)small[16 + lane];
    }
    int code = (int)(word >> layout.bits * (place % each) & ((1u << layout.bits) - 1));
    if (matrix.format == kN8) code = (int8_t)code;
    out[k] = fmaf(scale, (float)code, minimum);
  }
}

// ---- an engine -----------------------------------------------------------------------------------

class Scratch {  // aligned memory that only grows
 public:
  ~Scratch() { free(data_); }
  template <class T> T* get(size_t count) {
    size_t bytes = (count * sizeof(T) + 63) / 64 * 64;
    if (bytes > bytes_) {
      free(data_);
      bytes_ = 0;
      data_ = aligned_alloc(64, bytes);
      if (!data_) throw std::bad_alloc();
      bytes_ = bytes;
    }
    return (T*)data_;
  }

 private:
  void* data_ = nullptr;
  size_t bytes_ = 0;
};

bool runs(const char* isa) {  // this CPU does
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
                      __builtin_cpu_supports("avx512vnni");
  if (!strcmp(isa, "avx512")) return avx512;
  return avx2 && (!strcmp(isa, "avx2") || !strcmp(isa, "portable"));
#elif defined(__aarch64__)
  return !strcmp(isa, "portable");
#endif
  return false;
}

const Kernels* choose(const char* name) {
  for (const Kernels* kernels : {&kAvx512, &kAvx2, &kPortable})
    if (kernels && runs(kernels->name) && (!name || !*name || !strcmp(name, kernels->name))) return kernels;
  return nullptr;
}

}  // namespace

struct Layer {
  const float *input_norm, *mlp_norm, *query_norm, *key_norm;  // the last two may be null
  Linear qkv, output, gate_up, down;
  int32_t rotates, window;  // positions that a row sees; 0: all before it
};

struct Shape {
  int32_t hidden, heads, kv_heads, head_dim, inner, block_size, bfloat16, int8;
  float eps;
};

enum Product { kQkv, kOutput, kGateUp, kDown };

struct Pair { Linear down, up; };  // a LoRA adapter's part of a product; none if `down.count` is 0

struct Adapter {
  const Pair* pairs;     // [layers][4], by Product
  const int32_t* rows;   // of the step that it is for, ascending
  int32_t count, reserved;
};

struct Step {
  const int32_t *positions, *slots, *query_starts, *context_lens, *block_tables;
  int32_t tokens, sequences, table_width, first_position;
  const Adapter* adapters;
  int32_t adapter_count, layer;  // the layer that runs
};

class Engine {
 public:
  Engine(int threads, const Kernels& kernels) : kernels_(kernels), pool_(threads) {}

  // This engine, held for the caller's thread to the end of the statement.
  struct Held {
    Engine* engine;
    std::lock_guard<std::mutex> lock;
    Engine* operator->() { return engine; }
  };
  Held alone() { return {this, std::lock_guard(mutex_)}; }

  void linear(const Linear& layer, const float* x, int m, const float* residual, float* y, bool int8) {
    for (int part = 0; part < layer.count; part++) linear(layer.parts[part], layer.rows, x, m, residual, y, int8);
  }

  void linear(const Matrix& weight, int width, const float* x, int m, const float* residual, float* y, bool int8) {
    LinearJob job{&weight, x, residual, y, m, width, nullptr, nullptr, nullptr};
    if (!int8 && weight.format > kBF16) {
      float* sums = numbers_.get<float>((size_t)m * weight.cols / 16);
      SumsJob summed{x, weight.cols, sums};
      over(m, 16, [&](int first, int last) { kernels_.sum(summed, first, last); });
      job.sums = sums;
    } else if (weight.format > kBF16) {
      const size_t blocks = (size_t)m * weight.cols / 32;
      float* scales = numbers_.get<float>(blocks * 3);
      int8_t* codes = codes_.get<int8_t>(blocks * 32);
      const bool in_halves = kLayouts[weight.format].bits == 4;
      QuantizeJob quantize{x, weight.cols, in_halves, codes, scales, scales + blocks};
      over(m, 4, [&](int first, int last) { kernels_.quantize(quantize, first, last); });
      job.codes = codes, job.scales = scales, job.sums = scales + blocks;
    }
    const int groups = (weight.rows + 15) / 16;
    int grain = (groups / (pool_.size() * 8) + 3) / 4 * 4;
    over(groups, std::max(grain, 4), [&](int first, int last) { kernels_.linear(job, first, last); });
  }

  // y [m, out] += up(down(x [m, in])) for the rows of each adapter; x and y begin at row `start`.
  void adapt(const Step& step, Product product, const float* x, float* y, int start, int m) {
    for (int i = 0; i < step.adapter_count; i++) {
      const Adapter& adapter = step.adapters[i];
      const Pair& pair = adapter.pairs[step.layer * 4 + product];
      if (!pair.down.count) continue;
      const int32_t* first = std::lower_bound(adapter.rows, adapter.rows + adapter.count, start);
      const int count = (int)(std::lower_bound(first, adapter.rows + adapter.count, start + m) - first);
      if (!count) continue;
      const size_t in = pair.down.cols, rank = pair.down.rows, out = pair.up.rows;
      float* gathered = adapted_.get<float>(count * (in + rank + out));
      float* small = gathered + count * in;
      float* added = small + count * rank;
      for (int n = 0; n < count; n++) memcpy(gathered + n * in, x + (first[n] - start) * in, in * 4);
      linear(pair.down, gathered, count, nullptr, small, false);
      linear(pair.up, small, count, nullptr, added, false);
      for (int n = 0; n < count; n++) {
        float* row = y + (first[n] - start) * out;
        for (size_t k = 0; k < out; k++) row[k] += added[n * out + k];
      }
    }
  }

  void norm(const float* x, const float* weight, float* y, int m, int cols, float eps) {
    NormJob job{x, weight, y, cols, cols, cols, eps};
    over(m, 8, [&](int first, int last) { kernels_.norm(job, first, last); });
  }

  void attention(const Layer& layer, const Shape& shape, const Step& step, const float* cos, const float* sin, void* cache, float* x) {
    const size_t tokens = step.tokens;
    const size_t attended = (size_t)shape.heads * shape.head_dim;
    const size_t width = attended + 2 * (size_t)shape.kv_heads * shape.head_dim;
    float* normed = first_.get<float>(tokens * (shape.hidden + width + attended));
    float* qkv = normed + tokens * shape.hidden;
    float* out = qkv + tokens * width;
    norm(x, layer.input_norm, normed, step.tokens, shape.hidden, shape.eps);
    linear(layer.qkv, normed, step.tokens, nullptr, qkv, shape.int8);
    adapt(step, kQkv, normed, qkv, 0, step.tokens);
    AttentionJob job{qkv, out, cache, cos, sin, layer.query_norm, layer.key_norm,
                     step.positions, step.slots, step.query_starts, step.context_lens, step.block_tables,
                     step.tokens, step.sequences, step.table_width, step.first_position,
                     shape.heads, shape.kv_heads, shape.head_dim, shape.block_size, layer.rotates,
                     shape.bfloat16, layer.window, shape.eps, nullptr};
    attend(job);
    linear(layer.output, out, step.tokens, x, x, shape.int8);
    adapt(step, kOutput, out, x, 0, step.tokens);
  }

  // Queries, keys and values [T, width] → out [T, heads · head_dim]; see AttentionJob.
  void attend(AttentionJob& job) {
    over(job.tokens, 4, [&](int first, int last) { kernels_.write(job, first, last); });
    const int most = std::max(48 / (job.heads / job.kv_heads), 1);
    parts_.clear();
    for (int s = 0; s < job.sequences; s++) {
      const int queries = job.query_starts[s + 1] - job.query_starts[s];
      for (int first = 0; first < queries; first += most)
        for (int head = 0; head < job.kv_heads; head++)
          parts_.insert(parts_.end(), {s, head, first, std::min(queries - first, most)});
    }
    job.parts = parts_.data();
    over((int)parts_.size() / 4, 1, [&](int first, int last) { kernels_.attend(job, first, last); });
  }

  void mlp(const Layer& layer, const Shape& shape, const Step& step, float* x) {
    constexpr int tile = 240;  // rows of x at a time, which bounds the memory
    const int tokens = step.tokens;
    const int rows = std::min(tokens, tile);
    const size_t hidden = shape.hidden, inner = shape.inner;
    float* normed = first_.get<float>(rows * (hidden + 3 * inner));
    float* both = normed + rows * hidden;
    float* act = both + rows * 2 * inner;
    for (int start = 0; start < tokens; start += tile, x += tile * hidden) {
      const int m = std::min(tokens - start, tile);
      norm(x, layer.mlp_norm, normed, m, shape.hidden, shape.eps);
      linear(layer.gate_up, normed, m, nullptr, both, shape.int8);
      adapt(step, kGateUp, normed, both, start, m);
      SwigluJob job{both, act, shape.inner};
      over(m, 4, [&](int first, int last) { kernels_.swiglu(job, first, last); });
      linear(layer.down, act, m, x, x, shape.int8);
      adapt(step, kDown, act, x, start, m);
    }
  }

  template <class F> void over(int count, int grain, F&& part) { pool_.run(count, grain, part); }

 private:
  const Kernels& kernels_;
  Pool pool_;
  std::mutex mutex_;
  Scratch first_, numbers_, codes_, adapted_;
  std::vector<int32_t> parts_;
};

extern "C" {

void pointsman_sample_rows(void* rows, int64_t first, int64_t last, const float* logits, const float* adjusted, int64_t vocab, const int64_t* ids, uint64_t purpose, uint64_t offset);

// The name of the instruction set that `isa` ("" for the best) chooses; null where there is none.
const char* pointsman_isa(const char* isa) {
  const Kernels* kernels = choose(isa);
  return kernels ? kernels->name : nullptr;
}

// 1: this CPU has the instruction set `isa`, whether or not there are kernels for it.
int pointsman_runs(const char* isa) { return runs(isa); }

Engine* pointsman_open(int threads, const char* isa) {
  const Kernels* kernels = choose(isa);
  return kernels ? new Engine(threads, *kernels) : nullptr;
}

void pointsman_close(Engine* engine) { delete engine; }

// Bytes of a weight [rows, cols] of a GGML type; -1: not a type of ours, or not whole blocks.
int64_t pointsman_packed_bytes(int type, int rows, int cols) {
  const int format = type_of(type).format;
  if (format < 0 || cols % kLayouts[format].span) return -1;
  return (rows + 15) / 16 * group_bytes(format, cols);
}

int pointsman_format(int type) { return type_of(type).format; }

// Puts `rows` rows of a file behind the first `at` rows of a weight [.., cols]. With `heads`, the two
// halves of every head's rows are interleaved in the file. 0: a scale that cannot be repacked.
int pointsman_pack(int type, const uint8_t* src, int rows, int cols, uint8_t* data, int at, int heads) {
  const Type& own = type_of(type);
  const int64_t each = group_bytes(own.format, cols), size = row_bytes(own, cols);
  const int head = heads ? rows / heads : 0;
  bool good = true;
  for (int i = 0; i < rows; i++) {
    const int place = head ? i / head * head + i % 2 * (head / 2) + i % head / 2 : i;
    const int row = at + place;
    good &= pack_row(type, src + i * size, data + row / 16 * each, row % 16, cols);
  }
  return good;
}

// Rows [n, cols] of a layer as float32, by their numbers.
void pointsman_rows(const Linear* layer, const int32_t* rows, int n, float* out) {
  for (int i = 0; i < n; i++)
    for (int part = 0; part < layer->count; part++) {
      const Matrix& matrix = layer->parts[part];
      const int row = rows[i] - matrix.first;
      if (row >= 0 && row < matrix.rows) unpack_row(matrix, row, out + (int64_t)i * layer->cols);
    }
}

void pointsman_linear(Engine* engine, const Linear* layer, const float* x, int m, const float* residual, float* y, int int8) {
  engine->alone()->linear(*layer, x, m, residual, y, int8);
}

// As pointsman_sample_rows, for all `count` rows, shared out to the engine's threads.
void pointsman_sample(Engine* engine, void* rows, int64_t count, const float* logits, const float* adjusted, int64_t vocab, const int64_t* ids, uint64_t purpose, uint64_t offset) {
  engine->alone()->over((int)count, 1, [&](int first, int last) {
    pointsman_sample_rows(rows, first, last, logits, adjusted, vocab, ids, purpose, offset);
  });
}

void pointsman_norm(Engine* engine, const float* x, const float* weight, float* y, int m, int cols, float eps) {
  engine->alone()->norm(x, weight, y, m, cols, eps);
}

// x [T, hidden] through layers in turn, in place; the cache of each lies `cache_bytes` behind the last.
void pointsman_layers(Engine* engine, const Layer* layers, int count, const Shape* shape, const Step* step, const float* cos, const float* sin, uint8_t* cache, int64_t cache_bytes, float* x) {
  Engine::Held held = engine->alone();
  Step now = *step;
  for (int i = 0; i < count; i++, cache += cache_bytes) {
    now.layer = i;
    held->attention(layers[i], *shape, now, cos, sin, cache, x);
    held->mlp(layers[i], *shape, now, x);
  }
}
}
