// Vectors of VL floats and what is done to them, in the widest form the compiler's target has.
//
// Knows no tensors. GCC/Clang vector extensions, so it compiles for any CPU; AVX-512 and AVX512-BF16 get intrinsics
// where the extensions cannot say it. A "word" is 32 bits of a matrix operand along the summed dimension: one float32,
// or two neighbouring bfloat16 (the first in the low half).
#pragma once

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define KV_AVX512 1
#endif
#if defined(__AVX512F__) || defined(__AVX2__) || defined(__SSE2__)
#include <immintrin.h>
#endif

#if defined(KV_AVX512)
#define VL 16
#elif defined(__AVX2__)
#define VL 8
#else
#define VL 4
#endif

#define KV_INLINE static inline __attribute__((always_inline))

typedef float vf __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint16_t vh __attribute__((vector_size(VL * 2)));

template <class V, class T>
KV_INLINE V load_as(const T* p) {
    V v;
    memcpy(&v, p, sizeof v);
    return v;
}
template <class V, class T>
KV_INLINE void store_as(T* p, V v) {
    memcpy(p, &v, sizeof v);
}
KV_INLINE vf splat(float x) { return vf{} + x; }
KV_INLINE vu splat_word(uint32_t x) { return vu{} + x; }
KV_INLINE vf max_of(vf a, vf b) { return a > b ? a : b; }
KV_INLINE vf select(vi mask, vf a, vf b) { return (vf)(((vi)a & mask) | ((vi)b & ~mask)); }

// Sum and maximum over the lanes, in one fixed order.
KV_INLINE float sum_lanes(vf v) {
    float x[VL];
    store_as(x, v);
    for (int step = VL / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] += x[i + step];
    return x[0];
}
KV_INLINE float max_lanes(vf v) {
#if defined(KV_AVX512)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float x[VL];
    store_as(x, v);
    for (int step = VL / 2; step; step /= 2)
        for (int i = 0; i < step; i++) x[i] = x[i] > x[i + step] ? x[i] : x[i + step];
    return x[0];
#endif
}

// e^x: x = n ln 2 + r, a polynomial of degree 6 in r, n added to the exponent. Relative error under 3e-7 (measured over
// [-87, 88]); 0 under -87 (so for -inf), the largest finite values above 88.
KV_INLINE vf exp_of(vf x) {
    const vf low = splat(-87.0f), high = splat(88.0f);
    vi dead = x < low;
    x = x > high ? high : x;
    x = select(dead, low, x);
    const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    vf n = (x * 1.44269504088896341f + magic) - magic;
    vf r = x - n * 0.693145751953125f;
    r = r - n * 1.42860677e-6f;
    vf p = splat(1.3981999e-3f);
    p = p * r + 8.3328241e-3f;
    p = p * r + 4.1667570e-2f;
    p = p * r + 1.6666654e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    vi e = __builtin_convertvector(n, vi);
    vf scale = (vf)((e + 127) << 23);
    return select(dead, splat(0.0f), p * scale);
}
KV_INLINE float exp_one(float x) { return exp_of(splat(x))[0]; }
KV_INLINE vf tanh_of(vf x) {
    vf limited = x > 20.0f ? splat(20.0f) : x;
    limited = limited < -20.0f ? splat(-20.0f) : limited;
    return 1.0f - 2.0f / (exp_of(limited + limited) + 1.0f);
}

KV_INLINE float bf16_to_float(uint16_t h) {
    uint32_t u = (uint32_t)h << 16;
    float f;
    memcpy(&f, &u, 4);
    return f;
}
// Zeros above each half. (The compiler makes three instructions of what is one.)
KV_INLINE vu widen(vh h) {
#if defined(KV_AVX512)
    return (vu)_mm512_cvtepu16_epi32((__m256i)h);
#else
    return __builtin_convertvector(h, vu);
#endif
}
// To nearest, ties to even, NaN stays NaN.
KV_INLINE vh to_bf16(vf v) {
#if defined(KV_AVX512) && defined(__AVX512BF16__)
    return (vh)_mm512_cvtneps_pbh((__m512)v);
#else
    vu u = (vu)v;
    vu rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    vu nan = (vu)(v != v);
    rounded = (rounded & ~nan) | (nan & 0x7fc0u);
    return __builtin_convertvector(rounded, vh);
#endif
}

// The element types. `mac` multiplies words and adds: acc + a * b, over the one or two elements of a word.
struct F32 {
    typedef float T;
    static constexpr int per_word = 1;
    KV_INLINE vf load(const T* p) { return load_as<vf>(p); }
    KV_INLINE void store(T* p, vf v) { store_as(p, v); }
    KV_INLINE float get(T x) { return x; }
    KV_INLINE T put(float x) { return x; }
    KV_INLINE vf mac(vf acc, vu a, vu b) { return acc + (vf)a * (vf)b; }
};
struct BF16 {
    typedef uint16_t T;
    static constexpr int per_word = 2;
    KV_INLINE vf load(const T* p) { return (vf)(widen(load_as<vh>(p)) << 16); }
    KV_INLINE void store(T* p, vf v) { store_as(p, to_bf16(v)); }
    KV_INLINE float get(T x) { return bf16_to_float(x); }
    KV_INLINE T put(float x) { return to_bf16(splat(x))[0]; }
    KV_INLINE vf mac(vf acc, vu a, vu b) {
#if defined(KV_AVX512) && defined(__AVX512BF16__)
        return (vf)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
#else
        acc = acc + (vf)(a << 16) * (vf)(b << 16);
        return acc + (vf)(a & 0xffff0000u) * (vf)(b & 0xffff0000u);
#endif
    }
};

constexpr ptrdiff_t LINE_BYTES = 64;
constexpr int IN_L2 = 2;  // how near to ask for memory: only some two dozen lines can be on their way to the first level

// acc[r][v] += sum over k of a[r][k] * b[k][v], all in words; b rows lie `b_stride` words apart, a rows `a_stride`.
// Each result sums over k in order, whatever R and NV are: it does not depend on how many rows are computed together.
// Meanwhile one line of `later` per k is asked for.
template <class E, int R, int NV>
KV_INLINE void mac_tile(vf (&acc)[R][NV], const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, ptrdiff_t b_stride,
                        ptrdiff_t k_words, const char* later) {
    for (ptrdiff_t k = 0; k < k_words; k++) {
        __builtin_prefetch(later + LINE_BYTES * k, 0, IN_L2);
        vu right[NV];
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) right[v] = load_as<vu>(b + k * b_stride + v * VL);
#pragma GCC unroll 16
        for (int r = 0; r < R; r++) {
            vu left = splat_word(a[r * a_stride + k]);
#pragma GCC unroll 16
            for (int v = 0; v < NV; v++) acc[r][v] = E::mac(acc[r][v], left, right[v]);
        }
    }
}

// c (+)= a b for R rows and NV vectors of columns.
template <class E, int R, int NV, bool ADD>
static void product_tile(const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, ptrdiff_t b_stride,
                         ptrdiff_t k_words, float* c, ptrdiff_t c_stride, const char* later) {
    vf acc[R][NV];
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) acc[r][v] = ADD ? load_as<vf>(c + r * c_stride + v * VL) : vf{};
    mac_tile<E, R, NV>(acc, a, a_stride, b, b_stride, k_words, later);
#pragma GCC unroll 16
    for (int r = 0; r < R; r++)
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) store_as(c + r * c_stride + v * VL, acc[r][v]);
}

template <class E, int R, int NV, bool ADD, class Ahead>
static void product_rest(int rows, const uint32_t* a, ptrdiff_t a_stride, const uint32_t* b, ptrdiff_t b_stride,
                         ptrdiff_t k_words, float* c, ptrdiff_t c_stride, Ahead& ahead) {
    if (rows == R)
        product_tile<E, R, NV, ADD>(a, a_stride, b, b_stride, k_words, c, c_stride, ahead.take((int)k_words));
    else if constexpr (R > 1)
        product_rest<E, R - 1, NV, ADD>(rows, a, a_stride, b, b_stride, k_words, c, c_stride, ahead);
}

template <class E, int NV, bool ADD, class Ahead>
static void product_rows(const uint32_t* a, ptrdiff_t a_stride, int rows, const uint32_t* b, ptrdiff_t b_stride,
                         ptrdiff_t k_words, float* c, ptrdiff_t c_stride, Ahead& ahead) {
    constexpr int most = VL == 4 ? 2 : VL == 8 ? 3 : 6;
    for (; rows > 0; rows -= most, a += most * a_stride, c += most * c_stride)
        product_rest<E, most, NV, ADD>(rows < most ? rows : most, a, a_stride, b, b_stride, k_words, c, c_stride, ahead);
}

// c [rows, columns] (+)= a [rows, k] b [k, columns]; columns is a multiple of VL. `ahead.take(n)` gives the address of n
// lines that will be read later.
template <class E, bool ADD, class Ahead>
static void product(const uint32_t* a, ptrdiff_t a_stride, int rows, const uint32_t* b, ptrdiff_t b_stride,
                    ptrdiff_t k_words, float* c, ptrdiff_t c_stride, int columns, Ahead& ahead) {
    int n = 0;
    for (; n + 4 * VL <= columns; n += 4 * VL)
        product_rows<E, 4, ADD>(a, a_stride, rows, b + n, b_stride, k_words, c + n, c_stride, ahead);
    for (; n < columns; n += VL)
        product_rows<E, 1, ADD>(a, a_stride, rows, b + n, b_stride, k_words, c + n, c_stride, ahead);
}

// Transpose: `rows` pointers to `words` words each become out[word * out_stride + row]. A null row becomes zeros.
KV_INLINE void transpose_rows(const uint32_t* const* rows, int num_rows, int words, uint32_t* out,
                              ptrdiff_t out_stride) {
    int row = 0;
#if defined(KV_AVX512)
    for (; row + 16 <= num_rows; row += 16) {
        int w = 0;
        for (; w + 16 <= words; w += 16) {
            __m512i t[16], u[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                t[i] = rows[row + i] ? _mm512_loadu_si512(rows[row + i] + w) : _mm512_setzero_si512();
#pragma GCC unroll 16
            for (int i = 0; i < 16; i += 2) {
                u[i] = _mm512_unpacklo_epi32(t[i], t[i + 1]);
                u[i + 1] = _mm512_unpackhi_epi32(t[i], t[i + 1]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < 16; i += 4) {
                t[i] = _mm512_unpacklo_epi64(u[i], u[i + 2]);
                t[i + 1] = _mm512_unpackhi_epi64(u[i], u[i + 2]);
                t[i + 2] = _mm512_unpacklo_epi64(u[i + 1], u[i + 3]);
                t[i + 3] = _mm512_unpackhi_epi64(u[i + 1], u[i + 3]);
            }
#pragma GCC unroll 16
            for (int i = 0; i < 4; i++) {
                u[i] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0x88);
                u[i + 4] = _mm512_shuffle_i32x4(t[i], t[i + 4], 0xdd);
                u[i + 8] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0x88);
                u[i + 12] = _mm512_shuffle_i32x4(t[i + 8], t[i + 12], 0xdd);
            }
#pragma GCC unroll 16
            for (int i = 0; i < 4; i++) {
                _mm512_storeu_si512(out + (w + i) * out_stride + row, _mm512_shuffle_i32x4(u[i], u[i + 8], 0x88));
                _mm512_storeu_si512(out + (w + i + 8) * out_stride + row, _mm512_shuffle_i32x4(u[i], u[i + 8], 0xdd));
                _mm512_storeu_si512(out + (w + i + 4) * out_stride + row,
                                    _mm512_shuffle_i32x4(u[i + 4], u[i + 12], 0x88));
                _mm512_storeu_si512(out + (w + i + 12) * out_stride + row,
                                    _mm512_shuffle_i32x4(u[i + 4], u[i + 12], 0xdd));
            }
        }
        for (; w < words; w++)
            for (int i = 0; i < 16; i++) out[w * out_stride + row + i] = rows[row + i] ? rows[row + i][w] : 0;
    }
#endif
    for (; row < num_rows; row++)
        for (int w = 0; w < words; w++) out[w * out_stride + row] = rows[row] ? rows[row][w] : 0;
}
