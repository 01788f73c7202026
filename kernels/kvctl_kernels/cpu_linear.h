// x W^T with W packed in panels of 32 outputs: [panel][word of k][output], so that a panel streams through memory once
// and one broadcast word of x meets 32 outputs without any sum across lanes.
//
// One packed copy serves every number of rows. Each output sums over k in order in one accumulator, whatever the number
// of rows: a row's result does not depend on the rows beside it, bit for bit.
#pragma once

#include "cpu_pool.h"
#include "cpu_simd.h"

namespace linear {

constexpr int PANEL = 32;
constexpr int PER_PANEL = PANEL / VL;                               // vectors
constexpr int MAX_ROWS = VL == 16 ? 12 : VL == 8 ? 3 : 2;           // rows of x against one panel in registers
constexpr int64_t BYTES_PER_PIECE = 128 << 10;                      // of weights, for a task
constexpr int64_t MOST_PIECES_PER_THREAD = 8;
constexpr int64_t PREFETCH_WORDS = 1024;                            // how far ahead the weights are asked for

inline int64_t panels(int64_t outputs) { return (outputs + PANEL - 1) / PANEL; }

// weight [outputs, words] (words along k) -> packed [panels, words, PANEL], outputs beyond the last are zero.
inline void pack(const uint32_t* weight, int64_t outputs, int64_t words, uint32_t* packed, int num_threads) {
    pool::each(panels(outputs), num_threads, [&](int64_t p) {
        const uint32_t* rows[PANEL];
        for (int i = 0; i < PANEL; i++) {
            const int64_t n = p * PANEL + i;
            rows[i] = n < outputs ? weight + n * words : nullptr;
        }
        transpose_rows(rows, PANEL, (int)words, packed + p * words * PANEL, PANEL);
    });
}

// Row `index` of the weight, out [words].
inline void unpack_row(const uint32_t* packed, int64_t words, int64_t index, uint32_t* out) {
    const uint32_t* from = packed + index / PANEL * words * PANEL + index % PANEL;
    for (int64_t k = 0; k < words; k++) out[k] = from[k * PANEL];
}

// R rows of x against P neighbouring panels.
template <class E, int R, int P>
static void tile(const uint32_t* x, int64_t x_stride, const uint32_t* packed, int64_t words, const float* bias,
                 typename E::T* y, int64_t y_stride, int64_t first, int64_t outputs) {
    constexpr int N = P * PER_PANEL;
    vf acc[R][N];
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
#pragma GCC unroll 32
        for (int v = 0; v < N; v++) acc[r][v] = vf{};
    const int64_t panel_words = words * PANEL;
    for (int64_t k = 0; k < words; k++) {
        vu right[N];
#pragma GCC unroll 32
        for (int v = 0; v < N; v++) {
            const uint32_t* from = packed + v / PER_PANEL * panel_words + k * PANEL + v % PER_PANEL * VL;
            if (v % PER_PANEL == 0) {
                __builtin_prefetch(from + PREFETCH_WORDS);
                __builtin_prefetch(from + PREFETCH_WORDS + 16);
            }
            right[v] = load_as<vu>(from);
        }
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
            vu left = splat_word(x[r * x_stride + k]);
#pragma GCC unroll 32
            for (int v = 0; v < N; v++) acc[r][v] = E::mac(acc[r][v], left, right[v]);
        }
    }
#pragma GCC unroll 32
    for (int v = 0; v < N; v++) {
        const int64_t n = first + v * VL;
        if (n >= outputs) break;
        const bool is_whole = n + VL <= outputs;
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
            typename E::T* to = y + r * y_stride + n;
            if (is_whole) {
                E::store(to, bias ? acc[r][v] + load_as<vf>(bias + n) : acc[r][v]);
            } else {
                for (int i = 0; n + i < outputs; i++) to[i] = E::put(acc[r][v][i] + (bias ? bias[n + i] : 0.0f));
            }
        }
    }
}

// All rows (a multiple of R) against the panels [begin, end): panel by panel, each met by all rows while it is cached.
template <class E, int R, int P>
static void sweep(const uint32_t* x, int64_t x_stride, int64_t rows, const uint32_t* packed, int64_t words,
                  const float* bias, typename E::T* y, int64_t y_stride, int64_t begin, int64_t end, int64_t outputs) {
    int64_t p = begin;
    for (; p + P <= end; p += P)
        for (int64_t r = 0; r < rows; r += R)
            tile<E, R, P>(x + r * x_stride, x_stride, packed + p * words * PANEL, words, bias, y + r * y_stride, y_stride,
                          p * PANEL, outputs);
    if constexpr (P > 1)
        if (p < end)
            sweep<E, R, 1>(x, x_stride, rows, packed, words, bias, y, y_stride, p, end, outputs);
}

template <class E, int R>
static void sweep_rows(const uint32_t* x, int64_t x_stride, int64_t rows, const uint32_t* packed, int64_t words,
                       const float* bias, typename E::T* y, int64_t y_stride, int64_t begin, int64_t end,
                       int64_t outputs) {
    // Few rows have few sums in flight with one panel; more panels at once hide the latency of each.
    constexpr int P = VL < 16 ? 1 : R == 1 ? 4 : R <= 3 ? 2 : 1;
    sweep<E, R, P>(x, x_stride, rows, packed, words, bias, y, y_stride, begin, end, outputs);
}

template <class E, int R>
static void dispatch(int64_t rows_at_once, const uint32_t* x, int64_t x_stride, int64_t rows, const uint32_t* packed,
                     int64_t words, const float* bias, typename E::T* y, int64_t y_stride, int64_t begin, int64_t end,
                     int64_t outputs) {
    if (rows_at_once == R)
        sweep_rows<E, R>(x, x_stride, rows, packed, words, bias, y, y_stride, begin, end, outputs);
    else if constexpr (R > 1)
        dispatch<E, R - 1>(rows_at_once, x, x_stride, rows, packed, words, bias, y, y_stride, begin, end, outputs);
}

// y [rows, outputs] = x [rows, words] W^T + bias.
template <class E>
void multiply(const uint32_t* x, int64_t x_stride, int64_t rows, const uint32_t* packed, int64_t words,
              const float* bias, typename E::T* y, int64_t y_stride, int64_t outputs, int num_threads) {
    const int64_t all = panels(outputs);
    // Equal tiles rather than full ones and a small rest: 13 rows are 7 + 6, not 12 + 1.
    const int64_t tiles = (rows + MAX_ROWS - 1) / MAX_ROWS;
    const int64_t small = tiles ? rows / tiles : 0, large_tiles = tiles ? rows % tiles : 0;
    const int64_t large_rows = large_tiles * (small + 1);
    // Pieces small enough that a thread which loses its core holds little back, large enough to stream.
    const int64_t pieces_by_size = all * words * PANEL * 4 / BYTES_PER_PIECE + 1;
    const int64_t pieces_by_threads = (int64_t)num_threads * MOST_PIECES_PER_THREAD;
    pool::ranges(all, pieces_by_size < pieces_by_threads ? pieces_by_size : pieces_by_threads, num_threads,
                 [&](int64_t begin, int64_t end) {
        // Panels outermost in steps that stay in the cache, so that both kinds of tiles meet a panel while it is there.
        const int64_t step = rows <= MAX_ROWS ? end - begin : 4;
        for (int64_t p = begin; p < end; p += step) {
            const int64_t last = p + step < end ? p + step : end;
            if (large_rows)
                dispatch<E, MAX_ROWS>(small + 1, x, x_stride, large_rows, packed, words, bias, y, y_stride, p, last,
                                      outputs);
            if (rows > large_rows)
                dispatch<E, MAX_ROWS>(small, x + large_rows * x_stride, x_stride, rows - large_rows, packed, words, bias,
                                      y + large_rows * y_stride, y_stride, p, last, outputs);
        }
    });
}

}  // namespace linear
