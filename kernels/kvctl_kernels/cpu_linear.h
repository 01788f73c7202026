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
constexpr int TILE_ROWS = VL == 16 ? 11 : MAX_ROWS;                 // the same where more rows follow: one fewer, faster
constexpr int64_t BYTES_PER_PIECE = 128 << 10;                      // of weights, for a task
constexpr int64_t MOST_PIECES_PER_THREAD = 8;
constexpr int64_t STREAM_AHEAD_WORDS = 2048;                        // how far ahead of few rows weights leave memory
constexpr int64_t NEAR_WORDS = 256;                                 // and of many rows the second level
constexpr int64_t LINE_WORDS = LINE_BYTES / 4;

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

template <class E>
struct Product {
    const uint32_t* x;  // [rows, words]
    int64_t x_stride;
    const uint32_t* packed;
    int64_t words;
    const float* bias;  // null: none
    typename E::T* y;   // [rows, outputs]
    int64_t y_stride;
    int64_t outputs;
};

// What a tile asks for beside its work: nothing, every second line of the weights `ahead` words on, or all of them.
enum Asks { NOTHING, HALF, ALL };

// Rows [row, row + R) against the panels [panel, panel + P).
template <class E, int R, int P, Asks ASKS>
static void tile(const Product<E>& in, int64_t row, int64_t panel, int64_t ahead) {
    constexpr int N = P * PER_PANEL;
    vf acc[R][N];
#pragma GCC unroll 32
    for (int r = 0; r < R; r++)
#pragma GCC unroll 32
        for (int v = 0; v < N; v++) acc[r][v] = vf{};
    const int64_t words = in.words, x_stride = in.x_stride, panel_words = words * PANEL;
    const uint32_t* x = in.x + row * x_stride;
    const uint32_t* packed = in.packed + panel * panel_words;
    for (int64_t k = 0; k < words; k++) {
        vu right[N];
#pragma GCC unroll 32
        for (int v = 0; v < N; v++) {
            const uint32_t* from = packed + v / PER_PANEL * panel_words + k * PANEL + v % PER_PANEL * VL;
            if (v % PER_PANEL == 0) {
                if (ASKS != NOTHING) __builtin_prefetch(from + ahead, 0, IN_L2);
                if (ASKS == ALL) __builtin_prefetch(from + ahead + LINE_WORDS, 0, IN_L2);
                if (ASKS != ALL) {  // a panel is larger than the first level
                    __builtin_prefetch(from + NEAR_WORDS);
                    __builtin_prefetch(from + NEAR_WORDS + LINE_WORDS);
                }
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
        const int64_t n = panel * PANEL + v * VL;
        if (n >= in.outputs) break;
        const bool is_whole = n + VL <= in.outputs;
#pragma GCC unroll 32
        for (int r = 0; r < R; r++) {
            typename E::T* to = in.y + (row + r) * in.y_stride + n;
            if (is_whole) {
                E::store(to, in.bias ? acc[r][v] + load_as<vf>(in.bias + n) : acc[r][v]);
            } else {
                for (int i = 0; n + i < in.outputs; i++)
                    to[i] = E::put(acc[r][v][i] + (in.bias ? in.bias[n + i] : 0.0f));
            }
        }
    }
}

// R rows are all there are: the panels [begin, end) stream from memory.
template <class E, int R, int P>
static void stream(const Product<E>& in, int64_t begin, int64_t end) {
    for (; begin + P <= end; begin += P) tile<E, R, P, ALL>(in, 0, begin, STREAM_AHEAD_WORDS);
    if constexpr (P > 1)
        if (begin < end) stream<E, R, 1>(in, begin, end);
}

template <class E, int R>
static void stream_rows(int rows, const Product<E>& in, int64_t begin, int64_t end) {
    // Few rows have few sums in flight with one panel; more panels at once hide the latency of each.
    constexpr int P = VL < 16 ? 1 : R == 1 ? 4 : R <= 3 ? 2 : 1;
    if (rows == R)
        stream<E, R, P>(in, begin, end);
    else if constexpr (R > 1)
        stream_rows<E, R - 1>(rows, in, begin, end);
}

template <class E, int R>
static void tile_rows(int rows, const Product<E>& in, int64_t row, int64_t panel, int64_t ahead) {
    if (rows != R) {
        if constexpr (R > 1) tile_rows<E, R - 1>(rows, in, row, panel, ahead);
    } else if (ahead) {
        tile<E, R, 1, HALF>(in, row, panel, ahead);
    } else {
        tile<E, R, 1, NOTHING>(in, row, panel, 0);
    }
}

// Many rows: panel by panel, each met by all rows while it is cached. The first two tiles ask for the next one, its even
// lines one of them, its odd ones the other: so memory works while the arithmetic does.
template <class E>
static void sweep(const Product<E>& in, int64_t rows, int64_t begin, int64_t end) {
    // Equal tiles rather than full ones and a small rest: 13 rows are 7 + 6, not 11 + 2.
    const int64_t tiles = (rows + TILE_ROWS - 1) / TILE_ROWS;
    for (int64_t panel = begin; panel < end; panel++)
        for (int64_t i = 0; i < tiles; i++) {
            const int64_t row = rows * i / tiles, last = rows * (i + 1) / tiles;
            const int64_t ahead = i < 2 ? in.words * PANEL + i * LINE_WORDS : 0;
            tile_rows<E, TILE_ROWS>((int)(last - row), in, row, panel, ahead);
        }
}

// y [rows, outputs] = x [rows, words] W^T + bias.
template <class E>
void multiply(const Product<E>& in, int64_t rows, int num_threads) {
    const int64_t all = panels(in.outputs);
    // Pieces small enough that a thread which loses its core holds little back, large enough to stream.
    const int64_t pieces_by_size = all * in.words * PANEL * 4 / BYTES_PER_PIECE + 1;
    const int64_t pieces_by_threads = (int64_t)num_threads * MOST_PIECES_PER_THREAD;
    pool::ranges(all, pieces_by_size < pieces_by_threads ? pieces_by_size : pieces_by_threads, num_threads,
                 [&](int64_t begin, int64_t end) {
        if (rows <= MAX_ROWS)
            stream_rows<E, MAX_ROWS>((int)rows, in, begin, end);
        else
            sweep(in, rows, begin, end);
    });
}

}  // namespace linear
