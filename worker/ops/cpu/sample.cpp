// Draws tokens from rows of logits: greedy, or by Gumbel-max after min-p, top-k and top-p.
//
// Theory of operation. `worker/ops/sample.py` defines what is drawn; this file finds the same token
// faster, or says that it cannot tell. Every quantity that is approximate here (exponentials, the
// logarithms of the noise, sums) has a bound on its distance from the definition's. A token is
// reported only if it wins whatever the errors are within these bounds; otherwise, in far fewer than
// one of 640 draws (tested), the row is UNDECIDED and the caller draws it by the definition itself. So results
// depend neither on the instruction set nor on the order of sums.
//
// - Noise. Words are NumPy's Philox4x64-10. -log(-log(1 - u)) < -log(u), and the exponent and
//   mantissa of a float, read as a number, are a piecewise linear log2 from below: so a conversion
//   and one multiplication bound a token's score plus noise from above. Only tokens whose bound
//   reaches the best sum so far get logarithms: a few dozen in a row.
// - top-k. The k-th largest of the largest scores of blocks is at most the k-th largest score, so
//   only blocks above it are looked into.
// - top-p. A token drawn from all is the token drawn from the nucleus if it is inside, and it is
//   inside if less than p of the mass lies above it: one sum tells, and neither a sort nor the end of
//   the nucleus is needed. If it is outside, so is all that is not above it, and what is above is
//   drawn from again: the share of the nucleus in it grows quickly.
#include <algorithm>
#include <cfloat>
#include <climits>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <functional>
#include <vector>

#if defined(__x86_64__)
#pragma GCC target("avx2,fma")  // an engine takes no less
#endif

namespace {

enum State : int32_t { DRAWN, UNDECIDED, NOT_NUMBERS, ALL_MASKED };

// One draw; `DRAWS` of worker/ops/sample.py is its twin.
struct Row {
    uint64_t seed, position;
    double top_p, log_min_p;  // 1 and -inf: off
    float temperature;        // 0: greedy
    int32_t top_k;            // 0: off
    int32_t row, adjusted;    // of the model's logits, and of the adjusted ones; -1: not adjusted
    int32_t token, state;     // the answer
};
static_assert(sizeof(Row) == 56, "DRAWS of worker/ops/sample.py has this size");

struct Noise {
    const int64_t* ids;  // [vocab] the tokens whose noise is meant; null: 0, 1, 2, …
    uint64_t purpose, offset;
};

constexpr int BLOCK = 64, LANES = 16;
constexpr float MOST_NOISE = 23.0f;  // u is at least 2^-33
// Shares and their sums, also the definition's, are right to 2^-17 each.
constexpr double SLACK = 1.0 / 32768;

struct Scratch {
    std::vector<int32_t> keys, ids;
    std::vector<float> values, sorted;
};

inline int32_t bits_of(float x) { int32_t b; std::memcpy(&b, &x, 4); return b; }
inline float float_of(int32_t b) { float x; std::memcpy(&x, &b, 4); return x; }
// Integers in the order of floats, and back: their maximum needs no rule for nan.
inline int32_t key_of(int32_t bits) { return bits ^ ((bits >> 31) & 0x7fffffff); }

// The largest key of each block into `keys`; returns the largest of all as a float, nan if any is.
float peak_of(const float* x, int64_t vocab, std::vector<int32_t>& keys) {
    keys.resize((vocab + BLOCK - 1) / BLOCK);
    int32_t best = INT_MIN, nans = 0;
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        int32_t most = INT_MIN;
        auto look = [&](int64_t i) {
            int32_t bits = bits_of(x[i]), key = key_of(bits);
            most = key > most ? key : most;
            nans |= (bits & 0x7fffffff) > 0x7f800000;
        };
        if (start + BLOCK <= vocab) for (int j = 0; j < BLOCK; ++j) look(start + j);
        else for (int64_t i = start; i < vocab; ++i) look(i);
        keys[start / BLOCK] = most;
        best = most > best ? most : best;
    }
    return nans ? NAN : float_of(key_of(best));
}

int32_t first_at(const float* x, int64_t vocab, float peak, const std::vector<int32_t>& keys) {
    for (int64_t b = 0;; ++b)
        if (float_of(key_of(keys[b])) == peak)
            for (int64_t i = b * BLOCK; i < std::min(vocab, (b + 1) * BLOCK); ++i)
                if (x[i] == peak) return int32_t(i);
}

// The words of tokens 8 n to 8 n + 7.
inline void philox(const Row& row, const Noise& noise, uint64_t n, uint32_t out[8]) {
    uint64_t a = n + 1, b = noise.offset, c = row.position, d = noise.purpose;
    uint64_t k0 = row.seed, k1 = 0;
    for (int round = 0; round < 10; ++round) {
        unsigned __int128 p = (unsigned __int128)a * 0xD2E7470EE14C6C93ull;
        unsigned __int128 q = (unsigned __int128)c * 0xCA5A826395121157ull;
        a = uint64_t(q >> 64) ^ b ^ k0, b = uint64_t(q);
        c = uint64_t(p >> 64) ^ d ^ k1, d = uint64_t(p);
        k0 += 0x9E3779B97F4A7C15ull, k1 += 0xBB67AE8584CAA73Bull;
    }
    uint64_t words[4] = {a, b, c, d};
    std::memcpy(out, words, 32);
}

// At least score + noise, but for an error of rounding that `Best::limit` makes room for.
inline float bound(float score, uint32_t word) {
    constexpr float LN2 = 0.69314718f;
    return score + (LN2 * (127 + 31) - float(bits_of(float(int32_t(word >> 1)))) * (LN2 / 8388608));
}

struct Best {
    double most = -INFINITY, second = -INFINITY;
    int64_t place = -1;
    float score = 0, limit = -INFINITY;  // what is below `limit` is not near `most`

    // Twice the distance of the definition's float32 sums from these, with logarithms that are right
    // to two units in the last place.
    double error() const { return 1.2e-5 + 3e-7 * std::fabs(most); }

    void consider(int64_t at, float value, uint32_t word) {
        float u = std::min((float(word) + 0.5f) * 0x1p-32f, 1 - 0x1p-24f);
        double sum = double(value) - std::log(-std::log1p(-double(u)));
        if (sum <= most) { second = std::max(second, sum); return; }
        second = most, most = sum, place = at, score = value;
        limit = float(most - error() - 1e-3 - 1e-6 * std::fabs(most));
    }
};

// All tokens, of which `keys` are the largest logits of blocks.
void draw_from_all(const Row& row, const float* x, int64_t vocab, const Noise& noise, const std::vector<int32_t>& keys,
                   Best& best) {
    alignas(64) uint32_t words[BLOCK];
    alignas(64) float scores[BLOCK];
    const float heat = row.temperature;
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        const float limit = best.limit;
        if (float_of(key_of(keys[start / BLOCK])) / heat + MOST_NOISE < limit) continue;
        int count = int(std::min<int64_t>(BLOCK, vocab - start)), hits = 0;
        if (count < BLOCK) std::fill_n(scores, BLOCK, -INFINITY);
        if (count == BLOCK) for (int j = 0; j < BLOCK; ++j) scores[j] = x[start + j] / heat;
        else for (int j = 0; j < count; ++j) scores[j] = x[start + j] / heat;
        for (int j = 0; j < BLOCK / 8; ++j) philox(row, noise, start / 8 + j, words + 8 * j);
        for (int j = 0; j < BLOCK; ++j) hits |= bound(scores[j], words[j]) >= limit;
        if (!hits) continue;
        for (int j = 0; j < count; ++j)
            if (scores[j] > -INFINITY && bound(scores[j], words[j]) >= best.limit)
                best.consider(start + j, scores[j], words[j]);
    }
}

// The tokens at the places `at`, in ascending order.
void draw_from_some(const Row& row, const Noise& noise, const std::vector<int32_t>& at,
                    const std::vector<float>& scores, Best& best) {
    uint32_t words[8];
    int64_t made = -1;
    for (size_t i = 0; i < at.size(); ++i) {
        int64_t id = noise.ids ? noise.ids[at[i]] : at[i];
        if (scores[i] + MOST_NOISE < best.limit) continue;
        if (id / 8 != made) philox(row, noise, uint64_t(made = id / 8), words);
        uint32_t word = words[id % 8];
        if (bound(scores[i], word) >= best.limit) best.consider(at[i], scores[i], word);
    }
}

// exp(x) for x <= 0, to 2^-21 of itself and of x's rounding.
inline float share(float x) {
    constexpr float MAGIC = 12582912.0f;  // 1.5 * 2^23: adding it rounds to whole numbers
    x = -float_of(std::min(bits_of(-x), bits_of(87.0f)));
    float whole = (x * 1.44269504f + MAGIC) - MAGIC;
    float r = (x - whole * 0.693145752f) - whole * 1.42860677e-6f;
    float p = (1.3888889e-3f * r + 8.3333333e-3f) * r + 4.1666667e-2f;
    p = (((p * r + 0.16666667f) * r + 0.5f) * r + 1.0f) * r + 1.0f;
    return float_of(bits_of(p) + (int32_t(whole) << 23));
}

struct Mass { double total = 0, above = 0; };

// Adds the shares of scores x[0] / heat to x[BLOCK - 1] / heat, and of those above `least`.
inline void add_masses(const float* x, float heat, float peak, float least, double* totals, double* aboves) {
    alignas(64) float shares[BLOCK], uppers[BLOCK];
    for (int j = 0; j < BLOCK; ++j) {
        float score = x[j] / heat;
        shares[j] = share(score - peak);
        uppers[j] = float_of(bits_of(shares[j]) & -int32_t(score > least));
    }
    for (int i = LANES; i < BLOCK; i += LANES)
        for (int j = 0; j < LANES; ++j) shares[j] += shares[i + j], uppers[j] += uppers[i + j];
    for (int j = 0; j < LANES; ++j) totals[j] += double(shares[j]), aboves[j] += double(uppers[j]);
}

Mass mass_of(const float* x, int64_t count, float heat, float peak, float least) {
    double totals[LANES] = {}, aboves[LANES] = {};
    int64_t i = 0;
    for (; i + BLOCK <= count; i += BLOCK) add_masses(x + i, heat, peak, least, totals, aboves);
    float rest[BLOCK];
    std::fill_n(rest, BLOCK, -INFINITY);
    std::copy(x + i, x + count, rest);
    add_masses(rest, heat, peak, least, totals, aboves);
    Mass mass;
    for (int j = 0; j < LANES; ++j) mass.total += totals[j], mass.above += aboves[j];
    return mass;
}

// Places and scores of what is at least `least` and above -inf, into `ids` and `values`.
void gather(Scratch& w, const Row& row, const float* x, int64_t vocab, float least) {
    least = std::max(least, -FLT_MAX);
    w.ids.resize(vocab + 1), w.values.resize(vocab + 1);
    int32_t* ids = w.ids.data();
    float* values = w.values.data();
    int64_t n = 0;
    for (int64_t start = 0; start < vocab; start += BLOCK) {
        if (float_of(key_of(w.keys[start / BLOCK])) / row.temperature < least) continue;
        for (int64_t i = start, end = std::min(vocab, start + BLOCK); i < end; ++i) {
            ids[n] = int32_t(i), values[n] = x[i] / row.temperature;
            n += values[n] >= least;
        }
    }
    w.ids.resize(n), w.values.resize(n);
}

// Leaves those of `ids` and `values` that are at least `least`.
void keep(Scratch& w, float least) {
    size_t n = 0;
    for (size_t i = 0; i < w.ids.size(); ++i) {
        w.ids[n] = w.ids[i], w.values[n] = w.values[i];
        n += w.values[i] >= least;
    }
    w.ids.resize(n), w.values.resize(n);
}

float kth_largest(Scratch& w, const Row& row, const float* x, int64_t vocab, int64_t k) {
    float least = -INFINITY;
    auto largest_first = [&](int64_t at) {
        std::nth_element(w.sorted.begin(), w.sorted.begin() + at, w.sorted.end(), std::greater<float>());
        return w.sorted[at];
    };
    if (k <= int64_t(w.keys.size())) {
        w.sorted.clear();
        for (int32_t key : w.keys) w.sorted.push_back(float_of(key_of(key)) / row.temperature);
        least = largest_first(k - 1);
    }
    gather(w, row, x, vocab, least);
    if (int64_t(w.values.size()) < k) return -INFINITY;
    w.sorted = w.values;
    return largest_first(k - 1);
}

// Draws from all tokens or, with a `list`, from those in `ids` and `values`; with top-p, again from
// those above the token drawn until one is inside the nucleus, which all of them but it are.
State draw_hot(Scratch& w, Row& row, const float* x, int64_t vocab, const Noise& noise, float peak) {
    float floor = float(double(peak) + row.log_min_p);
    if (row.top_k > 0 && row.top_k < vocab) floor = std::max(floor, kth_largest(w, row, x, vocab, row.top_k));
    bool list = floor > -INFINITY || noise.ids;
    if (list) gather(w, row, x, vocab, floor);
    for (double cut = -1;;) {
        Best best;
        if (list) draw_from_some(row, noise, w.ids, w.values, best);
        else draw_from_all(row, x, vocab, noise, w.keys, best);
        row.token = int32_t(best.place);
        if (best.most - best.second <= best.error()) return UNDECIDED;
        if (row.top_p >= 1) return DRAWN;
        Mass mass = list ? mass_of(w.values.data(), int64_t(w.values.size()), 1, peak, best.score)
                         : mass_of(x, vocab, row.temperature, peak, best.score);
        if (cut < 0) cut = row.top_p * mass.total;
        if (mass.above < cut * (1 - SLACK)) return DRAWN;
        if (mass.above <= cut * (1 + SLACK)) return UNDECIDED;
        float above = std::nextafter(best.score, INFINITY);
        if (list) keep(w, above);
        else gather(w, row, x, vocab, above);
        list = true;
    }
}

State draw(Scratch& w, Row& row, const float* raw, const float* x, int64_t vocab, const Noise& noise) {
    row.token = 0;
    float peak = peak_of(raw, vocab, w.keys);
    if (!std::isfinite(peak)) return NOT_NUMBERS;
    if (x != raw) peak = peak_of(x, vocab, w.keys);
    const bool greedy = row.temperature == 0;
    const float top = greedy ? peak : peak / row.temperature;
    if (!(row.temperature >= 0)) return UNDECIDED;
    if (top == -INFINITY) return ALL_MASKED;
    if (!std::isfinite(top)) return NOT_NUMBERS;
    if (!greedy) return draw_hot(w, row, x, vocab, noise, top);
    row.token = first_at(x, vocab, peak, w.keys);
    return DRAWN;
}

}  // namespace

// Answers rows[first] to rows[last - 1] from logits and adjusted, both [any, vocab] float32, with
// noise of (purpose, offset); `ids` [vocab] are the tokens whose noise is meant, in ascending order, or
// null for all. The token answered is a place in the row. Calls for other rows may run at the same time.
extern "C" void pointsman_sample_rows(void* rows, int64_t first, int64_t last, const float* logits,
                                      const float* adjusted, int64_t vocab, const int64_t* ids,
                                      uint64_t purpose, uint64_t offset) {
    static thread_local Scratch scratch;
    const Noise noise{ids, purpose, offset};
    for (int64_t i = first; i < last; ++i) {
        Row& row = static_cast<Row*>(rows)[i];
        const float* raw = logits + row.row * vocab;
        const float* x = row.adjusted < 0 ? raw : adjusted + row.adjusted * vocab;
        row.state = draw(scratch, row, raw, x, vocab, noise);
    }
}
