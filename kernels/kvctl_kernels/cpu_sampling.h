// Drawing a token from scaled logits: min_p, top_k, top_p, then an exponential race between what is left.
//
// The same rules, noise and order of candidates as kvctl/engine/sampler_random.py (see there for why a race). A row is
// drawn by one thread: nothing but the row and its key decides. Sorts only candidates near the top: those within a
// distance of the largest logit, the distance grown until they hold the answer.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu_pool.h"
#include "cpu_simd.h"

namespace sampling {

// Natural logarithm of positive normal numbers: x = m 2^e with m in [sqrt(1/2), sqrt(2)), log m from a series in
// (m - 1) / (m + 1). Relative error under 3e-7, near 1 absolute error under 2e-8 (measured).
KV_INLINE vf log_of(vf x) {
    vi bits = (vi)x;
    vi e = (bits - 0x3f3504f3) >> 23;  // exponent, with the mantissa's half above sqrt(2) moved to the next
    vf m = (vf)(bits - (e << 23));
    vf s = (m - 1.0f) / (m + 1.0f);
    vf t = s * s;
    vf p = splat(0.22222222f);
    p = p * t + 0.28571429f;
    p = p * t + 0.4f;
    p = p * t + 0.66666667f;
    p = p * t + 2.0f;
    return __builtin_convertvector(e, vf) * 0.693147180559945f + p * s;
}

KV_INLINE vu mix(vu x) {
    x = (x ^ (x >> 16)) * 0x7feb352du;
    x = (x ^ (x >> 15)) * 0x846ca68bu;
    return x ^ (x >> 16);
}

// -log E for tokens `ids`, E ~ Exp(1) from the hash of key and id.
KV_INLINE vf noise(vu ids, uint32_t low, uint32_t high) {
    const vu bits = mix(mix(ids ^ low) ^ high);
    const vf v = __builtin_convertvector(bits, vf) * 2.3283064365386963e-10f + 1.1641532182693481e-10f;
    // E = -log(1 - v) to the last bits of a small v: the error of w = 1 - v is taken out by v / (1 - w).
    const vf w = 1.0f - v, rounded = 1.0f - w;
    const vf lost = w > 0.0f ? w : splat(1e-30f);  // v rounded to one: such a token as good as never wins
    const vf e = rounded == 0.0f ? v : -log_of(lost) * (v / (rounded == 0.0f ? splat(1.0f) : rounded));
    return -log_of(e);
}
constexpr float FIRST_DISTANCE = 4, LAST_DISTANCE = 60;  // from the top; beyond that, all tokens are looked at
constexpr float MOST_NOISE = 23.0f;  // -log of the smallest E, 2^-33

struct Candidate {
    float logit;
    int32_t id;
    bool operator<(const Candidate& other) const {
        return logit > other.logit || (logit == other.logit && id < other.id);
    }
};

struct Row {
    const float* logits;
    int64_t width;
    uint32_t low, high;  // of the key
    int64_t top_k;       // 0: off
    float top_p, min_p;  // 1, 0: off
};

KV_INLINE vu lanes() {
    vu v;
    for (int i = 0; i < VL; i++) v[i] = (uint32_t)i;
    return v;
}

inline float largest(const Row& row) {
    vf top = splat(-INFINITY);
    int64_t d = 0;
    for (; d + VL <= row.width; d += VL) top = max_of(top, load_as<vf>(row.logits + d));
    float best = max_lanes(top);
    for (; d < row.width; d++) best = row.logits[d] > best ? row.logits[d] : best;
    return best;
}

// Sum of exp(logit - top), in one fixed order.
inline double mass_of_all(const Row& row, float top) {
    double total = 0;
    int64_t d = 0;
    while (d + VL <= row.width) {
        vf sum{};
        for (int i = 0; i < 64 && d + VL <= row.width; i++, d += VL) sum = sum + exp_of(load_as<vf>(row.logits + d) - top);
        total += sum_lanes(sum);
    }
    for (; d < row.width; d++) total += exp_one(row.logits[d] - top);
    return total;
}

// The race between all tokens. A token that could not win with the best noise there is costs one comparison.
inline int64_t draw_of_all(const Row& row) {
    float best = -INFINITY;
    int64_t winner = 0;
    const vu lane = lanes();
    for (int64_t d = 0; d < row.width; d += VL) {
        vf logit = splat(-INFINITY);
        if (d + VL <= row.width)
            logit = load_as<vf>(row.logits + d);
        else
            for (int64_t i = 0; d + i < row.width; i++) logit[i] = row.logits[d + i];
        if (!(max_lanes(logit) + MOST_NOISE > best)) continue;
        const vf score = logit + noise(lane + (uint32_t)d, row.low, row.high);
        if (!(max_lanes(score) > best)) continue;
        for (int i = 0; i < VL; i++)
            if (score[i] > best) {
                best = score[i];
                winner = d + i;
            }
    }
    return winner;
}

inline void collect(const Row& row, float above, std::vector<Candidate>& into) {
    into.clear();
    for (int64_t d = 0; d < row.width; d += VL) {
        if (d + VL <= row.width && max_lanes(load_as<vf>(row.logits + d)) < above) continue;
        for (int64_t i = d; i < d + VL && i < row.width; i++)
            if (row.logits[i] >= above) into.push_back({row.logits[i], (int32_t)i});
    }
}

// Sum of exp(logit - top) over found[begin, end).
inline double mass_of(const std::vector<Candidate>& found, size_t begin, size_t end, float top) {
    double total = 0;
    for (size_t i = begin; i < end; i += VL) {
        vf logit = splat(-INFINITY);
        for (size_t j = 0; j < VL && i + j < end; j++) logit[j] = found[i + j].logit;
        total += sum_lanes(exp_of(logit - top));
    }
    return total;
}

// How many of the sorted found[begin, end) it takes, after a mass of `before`, to reach `wanted`; at least one in all.
inline size_t reach(const std::vector<Candidate>& found, size_t begin, double before, double wanted, float top) {
    size_t n = begin;
    while (n < found.size() && (n == 0 || before < wanted)) before += exp_one(found[n++].logit - top);
    return n;
}

// Leave in `found` what top_p alone keeps. What is nearer to the top than the last but one distance is in any case.
inline void keep_top_p(const Row& row, float top, std::vector<Candidate>& found) {
    const double wanted = (double)row.top_p * mass_of_all(row, top);
    float inner = INFINITY;
    double inner_mass = 0;
    for (float distance = FIRST_DISTANCE;; distance += 2) {
        const bool everything = distance > LAST_DISTANCE;
        const float above = everything ? -INFINITY : top - distance;
        collect(row, above, found);
        const double mass = mass_of(found, 0, found.size(), top);
        if (mass < wanted && !everything) {
            inner = above;
            inner_mass = mass;
            continue;
        }
        const auto middle = std::partition(found.begin(), found.end(), [&](const Candidate& c) { return c.logit >= inner; });
        std::sort(middle, found.end());
        found.resize(reach(found, (size_t)(middle - found.begin()), inner_mass, wanted, top));
        return;
    }
}

// Leave in `found` what min_p and top_k, then top_p of the rest, keep.
inline void keep_min_p_and_top_k(const Row& row, float top, std::vector<Candidate>& found) {
    const float floor = row.min_p > 0 ? top + logf(row.min_p) : -INFINITY;
    for (float distance = FIRST_DISTANCE;; distance += 2) {
        float above = distance > LAST_DISTANCE ? -INFINITY : top - distance;
        if (above < floor) above = floor;
        collect(row, above, found);
        if (above == floor || (row.top_k && found.size() >= (size_t)row.top_k)) break;
    }
    if (row.top_k && found.size() > (size_t)row.top_k) {
        std::nth_element(found.begin(), found.begin() + row.top_k, found.end());
        found.resize((size_t)row.top_k);
    }
    if (row.top_p < 1) {
        std::sort(found.begin(), found.end());
        found.resize(reach(found, 0, 0, (double)row.top_p * mass_of(found, 0, found.size(), top), top));
    }
}

inline int64_t draw_of_some(const Row& row, std::vector<Candidate>& found) {
    const float top = largest(row);
    if (!(top > -INFINITY)) return 0;  // everything is banned
    if (row.top_k || row.min_p > 0)
        keep_min_p_and_top_k(row, top, found);
    else
        keep_top_p(row, top, found);
    const size_t kept = found.size();
    float best = -INFINITY;
    int64_t winner = found[0].id;
    for (size_t i = 0; i < kept; i += VL) {
        vf logit = splat(-INFINITY);
        vu id{};
        for (size_t j = 0; j < VL && i + j < kept; j++) {
            logit[j] = found[i + j].logit;
            id[j] = (uint32_t)found[i + j].id;
        }
        const vf score = logit + noise(id, row.low, row.high);
        for (int j = 0; j < VL; j++)
            if (score[j] > best) {
                best = score[j];
                winner = id[j];
            }
    }
    return winner;
}

// keys [rows, 2]: low and high half; out [rows].
inline void draw(const float* logits, int64_t stride, int64_t rows, int64_t width, const int64_t* keys,
                 const int64_t* top_k, const float* top_p, const float* min_p, int64_t* out, int num_threads) {
    pool::each(rows, num_threads, [&](int64_t i) {
        static thread_local std::vector<Candidate> found;
        const Row row{logits + i * stride, width, (uint32_t)keys[2 * i], (uint32_t)keys[2 * i + 1],
                      top_k[i],            top_p[i], min_p[i]};
        const bool is_free = row.top_k == 0 && row.top_p >= 1 && !(row.min_p > 0);
        out[i] = is_free ? draw_of_all(row) : draw_of_some(row, found);
    });
}

}  // namespace sampling
