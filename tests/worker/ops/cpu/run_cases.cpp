// Runs the cases of test_native_on_arm.py: reads numbers and arrays from stdin, and writes the arrays that the kernels
// compute of them to stdout.
#include "native.cpp"

#include <cstdio>
#include <vector>

namespace {

using Array = std::vector<uint8_t>;

struct Case {
  std::vector<int32_t> numbers;  // the first one is its kind
  std::vector<Array> arrays;
};

template <class T> T* in(Array& array) { return array.empty() ? nullptr : (T*)array.data(); }

template <class T> bool fill(std::vector<T>& to, int64_t count) {
  to.resize(count);
  return fread(to.data(), sizeof(T), count, stdin) == (size_t)count;
}

bool next(Case& now) {
  std::vector<int64_t> sizes;  // of numbers and arrays, then of each array
  if (!fill(sizes, 2)) return false;
  now.arrays.resize(sizes[1]);
  if (!fill(now.numbers, sizes[0]) || !fill(sizes, sizes[1])) abort();
  for (size_t i = 0; i < sizes.size(); i++)
    if (!fill(now.arrays[i], sizes[i])) abort();
  return true;
}

void write(const void* data, size_t bytes) {
  if (fwrite(data, 1, bytes, stdout) != bytes) abort();
}

// A product of one part; `held` gets its memory.
Linear product(int type, int rows, int cols, Array& blocks, const float* bias, std::vector<Array>& held) {
  held.emplace_back(pointsman_packed_bytes(type, rows, cols));
  if (!pointsman_pack(type, blocks.data(), rows, cols, held.back().data(), 0, 0)) abort();
  return {{{pointsman_format(type), rows, cols, 0, held.back().data(), bias}}, 1, rows, cols, 0};
}

void linear(Engine* engine, Case& now) {
  const int type = now.numbers[1], rows = now.numbers[2], cols = now.numbers[3], m = now.numbers[4];
  std::vector<Array> held;
  Linear layer = product(type, rows, cols, now.arrays[0], in<float>(now.arrays[2]), held);
  std::vector<int32_t> all(rows);
  for (int i = 0; i < rows; i++) all[i] = i;
  std::vector<float> weights((size_t)rows * cols), y((size_t)m * rows);
  pointsman_rows(&layer, all.data(), rows, weights.data());
  write(weights.data(), weights.size() * 4);
  pointsman_linear(engine, &layer, in<float>(now.arrays[1]), m, in<float>(now.arrays[3]), y.data(), now.numbers[5]);
  write(y.data(), y.size() * 4);
}

void norm(Engine* engine, Case& now) {
  const int m = now.numbers[1], cols = now.numbers[2];
  std::vector<float> y((size_t)m * cols);
  pointsman_norm(engine, in<float>(now.arrays[0]), in<float>(now.arrays[1]), y.data(), m, cols, 1e-5f);
  write(y.data(), y.size() * 4);
}

void layers(Engine* engine, Case& now) {
  const int32_t* n = now.numbers.data() + 1;
  std::vector<Array>& a = now.arrays;
  const Shape shape = {n[0], n[1], n[2], n[3], n[4], n[5], n[6], n[7], 1e-5f};
  std::vector<Array> held;
  const int attended = shape.heads * shape.head_dim, width = attended + 2 * shape.kv_heads * shape.head_dim;
  const Layer layer = {in<float>(a[0]), in<float>(a[1]), in<float>(a[2]), in<float>(a[3]),
                       product(F32, width, shape.hidden, a[4], nullptr, held),
                       product(F32, shape.hidden, attended, a[5], nullptr, held),
                       product(F32, 2 * shape.inner, shape.hidden, a[6], nullptr, held),
                       product(F32, shape.hidden, shape.inner, a[7], nullptr, held), n[8], n[9]};
  const Step step = {in<int32_t>(a[8]), in<int32_t>(a[9]), in<int32_t>(a[10]), in<int32_t>(a[11]), in<int32_t>(a[12]),
                     n[10], n[11], n[12], 0, nullptr, 0, 0};
  pointsman_layers(engine, &layer, 1, &shape, &step, in<float>(a[13]), in<float>(a[14]), a[15].data(), 0, in<float>(a[16]));
  write(a[16].data(), a[16].size());
  write(a[15].data(), a[15].size());
}

void sample(Engine* engine, Case& now) {
  pointsman_sample(engine, now.arrays[0].data(), now.numbers[1], in<float>(now.arrays[1]), nullptr, now.numbers[2],
                   nullptr, 0, 0);
  write(now.arrays[0].data(), now.arrays[0].size());
}

}  // namespace

int main() {
  Engine* engine = pointsman_open(2, "");
  if (!engine) return 1;
  for (Case now; next(now);) {
    void (*const kinds[])(Engine*, Case&) = {linear, norm, layers, sample};
    kinds[now.numbers[0]](engine, now);
  }
  pointsman_close(engine);
}
