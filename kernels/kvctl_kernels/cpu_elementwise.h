// What happens to rows between the matrix products: norms, gates, rotation and KV store, argmax.
//
// All arithmetic is float32, rounded once at the end. A row is computed by one thread in one order, so its result does
// not depend on the other rows.
#pragma once

#include "cpu_pool.h"
#include "cpu_simd.h"

namespace elementwise {

// Rows are shared between threads only where that saves more than handing them over costs (elements).
constexpr int64_t WORTH_SHARING = 1 << 14;

// row(i) for each i in [0, rows), in pieces of some WORTH_SHARING elements.
template <class F>
void each_row(int64_t rows, int64_t elements_per_row, int num_threads, F&& row) {
    pool::ranges(rows, rows * elements_per_row / WORTH_SHARING + 1, num_threads, [&](int64_t begin, int64_t end) {
        for (int64_t i = begin; i < end; i++) row(i);
    });
}

// x and out [rows, width]; with `residual`, x + residual is rounded, written to new_residual and normalised. Weights are
// float32 for every E: a stored 1 + w has more digits than bfloat16.
template <class E>
void rms_norm(const typename E::T* x, int64_t x_stride, const typename E::T* residual, typename E::T* new_residual,
              const float* weight, typename E::T* out, int64_t rows, int64_t inner, int64_t x_inner_stride,
              int64_t width, float eps, int num_threads) {
    typedef typename E::T T;
    each_row(rows * inner, width, num_threads, [&](int64_t i) {
        const T* from = x + i / inner * x_stride + i % inner * x_inner_stride;
        T* to = out + i * width;
        int64_t d = 0;
        vf squares{};
        if (residual) {
            const T* more = residual + i * width;
            T* sum = new_residual + i * width;
            for (; d + VL <= width; d += VL) {
                E::store(sum + d, E::load(from + d) + E::load(more + d));
                vf v = E::load(sum + d);
                squares = squares + v * v;
            }
            for (; d < width; d++) sum[d] = E::put(E::get(from[d]) + E::get(more[d]));
            from = sum;
        } else {
            for (; d + VL <= width; d += VL) {
                vf v = E::load(from + d);
                squares = squares + v * v;
            }
        }
        float total = sum_lanes(squares);
        for (d = width / VL * VL; d < width; d++) total += E::get(from[d]) * E::get(from[d]);
        const float inverse = 1.0f / sqrtf(total / (float)width + eps);
        for (d = 0; d + VL <= width; d += VL) E::store(to + d, E::load(from + d) * inverse * load_as<vf>(weight + d));
        for (; d < width; d++) to[d] = E::put(E::get(from[d]) * inverse * weight[d]);
    });
}

KV_INLINE vf silu(vf x) {
    const vf small = exp_of(x > 0.0f ? -x : x);  // never above one: nothing overflows
    return x * (x > 0.0f ? splat(1.0f) : small) / (1.0f + small);
}
KV_INLINE vf gelu_tanh(vf x) {
    const vf inner = (x + x * x * x * 0.044715f) * 0.7978845608028654f;  // sqrt(2 / pi)
    return x * 0.5f * (1.0f + tanh_of(inner));
}

// x [rows, 2 * width], gate first; out [rows, width].
template <class E, bool GELU>
void gate(const typename E::T* x, int64_t x_stride, typename E::T* out, int64_t rows, int64_t width, int num_threads) {
    typedef typename E::T T;
    each_row(rows, 2 * width, num_threads, [&](int64_t i) {
        const T* left = x + i * x_stride;
        const T* right = left + width;
        T* to = out + i * width;
        int64_t d = 0;
        for (; d + VL <= width; d += VL) {
            vf g = E::load(left + d);
            E::store(to + d, (GELU ? gelu_tanh(g) : silu(g)) * E::load(right + d));
        }
        for (; d < width; d++) {
            vf g = splat(E::get(left[d]));
            to[d] = E::put(((GELU ? gelu_tanh(g) : silu(g)) * E::get(right[d]))[0]);
        }
    });
}

// to = from turned by the angles of one position; cos_sin: rot_dim / 2 cosines, then sines. `to` may be `from`.
template <class E>
KV_INLINE void rotate_head(const typename E::T* from, typename E::T* to, const float* cos_sin, int rot_dim,
                           int head_dim) {
    const int half = rot_dim / 2;
    int d = 0;
    for (; d + VL <= half; d += VL) {
        vf a = E::load(from + d), b = E::load(from + half + d);
        vf c = load_as<vf>(cos_sin + d), s = load_as<vf>(cos_sin + half + d);
        E::store(to + d, a * c - b * s);
        E::store(to + half + d, b * c + a * s);
    }
    for (; d < half; d++) {
        float a = E::get(from[d]), b = E::get(from[half + d]);
        to[d] = E::put(a * cos_sin[d] - b * cos_sin[half + d]);
        to[half + d] = E::put(b * cos_sin[d] + a * cos_sin[half + d]);
    }
    if (to != from) memcpy(to + rot_dim, from + rot_dim, sizeof(typename E::T) * (head_dim - rot_dim));
}

struct Rotary {
    void* query;  // [T, Hq, D] rotated in place, tokens query_stride elements apart; null: none
    void* key;    // [T, Hkv, D]; rotated in place, or into the cache where there is one
    const void* value;
    void* k_cache;  // [num_blocks, Hkv, block_size, D]; null: nothing is stored
    void* v_cache;
    const int64_t* positions;  // null: no rotation
    const float* cos_sin;      // [max_positions, rot_dim]
    const int64_t* slots;      // -1: skip the store
    int64_t query_stride, key_stride, value_stride;
    int64_t num_tokens;
    int32_t num_heads, num_kv_heads, head_dim, rot_dim, block_size;
};

template <class E>
void rotary(const Rotary& in, int num_threads) {
    typedef typename E::T T;
    const int head_dim = in.head_dim;
    const int64_t per_token = (int64_t)(in.num_heads + 2 * in.num_kv_heads) * head_dim;
    each_row(in.num_tokens, per_token, num_threads, [&](int64_t t) {
        const float* angles = in.positions ? in.cos_sin + in.positions[t] * in.rot_dim : nullptr;
        if (in.query) {
            T* query = static_cast<T*>(in.query) + t * in.query_stride;
            for (int h = 0; h < in.num_heads; h++)
                rotate_head<E>(query + (int64_t)h * head_dim, query + (int64_t)h * head_dim, angles, in.rot_dim, head_dim);
        }
        T* key = static_cast<T*>(in.key) + t * in.key_stride;
        if (!in.k_cache) {
            for (int h = 0; h < in.num_kv_heads; h++)
                rotate_head<E>(key + (int64_t)h * head_dim, key + (int64_t)h * head_dim, angles, in.rot_dim, head_dim);
            return;
        }
        const int64_t slot = in.slots[t];
        if (slot < 0) return;
        const T* value = static_cast<const T*>(in.value) + t * in.value_stride;
        for (int h = 0; h < in.num_kv_heads; h++) {
            const int64_t page = slot / in.block_size * in.num_kv_heads + h;
            const int64_t place = (page * in.block_size + slot % in.block_size) * head_dim;
            T* to = static_cast<T*>(in.k_cache) + place;
            if (angles)
                rotate_head<E>(key + (int64_t)h * head_dim, to, angles, in.rot_dim, head_dim);
            else
                memcpy(to, key + (int64_t)h * head_dim, sizeof(T) * head_dim);
            memcpy(static_cast<T*>(in.v_cache) + place, value + (int64_t)h * head_dim, sizeof(T) * head_dim);
        }
    });
}

// The first index of the largest value of each row; NaN counts as the smallest.
template <class E>
void argmax(const typename E::T* x, int64_t x_stride, int64_t* out, int64_t rows, int64_t width, int num_threads) {
    typedef typename E::T T;
    each_row(rows, width, num_threads, [&](int64_t i) {
        const T* row = x + i * x_stride;
        vf best = splat(-INFINITY);
        vi where{}, at{};
        int64_t d = 0;
        for (; d + VL <= width; d += VL) {
            vf v = E::load(row + d);
            vi better = v > best;
            best = better ? v : best;
            where = (better & at) | (~better & where);
            at = at + 1;
        }
        float top = -INFINITY;
        int64_t index = 0;
        for (int lane = 0; lane < VL && d > 0; lane++) {
            const int64_t candidate = (int64_t)where[lane] * VL + lane;
            if (best[lane] > top || (best[lane] == top && candidate < index)) {
                top = best[lane];
                index = candidate;
            }
        }
        for (; d < width; d++)
            if (E::get(row[d]) > top) {
                top = E::get(row[d]);
                index = d;
            }
        out[i] = index;
    });
}

}  // namespace elementwise
