// Paged attention: one algorithm for decode and prefill, so that a token's result does not depend on how it is batched.
//
// A task is up to MAX_ROWS query rows (queries x the query heads of one KV head) against one SPLIT of the context. Per
// tile of TILE keys: keys are transposed into words, scores, online softmax in float32, then times the values. Tiles
// and splits lie at fixed positions of the sequence and splits are merged in order, so every row goes through the same
// operations whatever shares its task, its batch or the machine: results are equal bit for bit.
//
//   short requests (few queries): tasks = requests x splits (x KV heads where that would leave threads idle); the last
//                                 one to finish merges the splits. All heads in one task walk through memory in order.
//   long chunks (prefill):        tasks = requests x KV heads x query blocks; each merges its splits as it goes
#pragma once

#include <stdlib.h>

#include <atomic>
#include <new>
#include <vector>

#include "cpu_pool.h"
#include "cpu_simd.h"

namespace attention {

constexpr int TILE = 64;       // keys; a multiple of every VL
constexpr int SPLIT = 256;     // keys; a multiple of TILE
constexpr int MAX_ROWS = 96;   // query rows of a prefill task
constexpr int FEW_QUERIES = 8; // up to this many queries a request's context is split over tasks
struct Arguments {
    const void* query;  // [T, Hq, D], tokens query_stride elements apart
    const void* k_cache;
    const void* v_cache;
    const int32_t* block_tables;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    void* output;  // [T, Hq, D], contiguous
    int64_t query_stride;
    int64_t table_stride;
    int32_t num_requests;
    int32_t num_heads;
    int32_t num_kv_heads;
    int32_t head_dim;
    int32_t block_size;
    int32_t window;  // 0: none
    float scale;
    float soft_cap;  // 0: none
};

struct Task {
    int32_t request;
    int32_t kv_head;  // the first of num_kv_heads
    int32_t num_kv_heads;
    int32_t first_query;  // within the request
    int32_t num_queries;
    int32_t first_split;
    int32_t num_splits;
    int64_t partial;  // where the split's result goes in the workspace, -1: this task owns all splits
    int32_t group;    // index of the counter that finds the last split, -1: none
    int64_t first_partial;
    int32_t all_splits;
};

// The running result of some rows: maximum, sum of weights, weighted values (not yet divided).
struct State {
    float* maximum;  // [rows]
    float* sum;      // [rows]
    float* values;   // [rows, D]
};

inline int64_t state_floats(int rows, int head_dim) { return (int64_t)rows * (head_dim + 2); }
inline State state_at(float* base, int rows) { return State{base, base + rows, base + 2 * rows}; }

// into = into + part, for one row. A part that saw no key (maximum -inf) changes nothing.
inline void merge_row(const State& into, const State& part, int row, int head_dim) {
    float a = into.maximum[row], b = part.maximum[row];
    float top = a > b ? a : b;
    if (top == -INFINITY) return;
    float keep = exp_one(a - top), add = exp_one(b - top);
    into.maximum[row] = top;
    into.sum[row] = into.sum[row] * keep + part.sum[row] * add;
    float* x = into.values + (int64_t)row * head_dim;
    const float* y = part.values + (int64_t)row * head_dim;
    for (int d = 0; d < head_dim; d += VL) {
        vf scaled = load_as<vf>(y + d) * add;
        store_as(x + d, load_as<vf>(x + d) * keep + scaled);
    }
}

// Buffers of one thread, grown once and kept for the thread's life.
class Scratch {
   public:
    ~Scratch() { free(data_); }
    char* at_least(size_t bytes) {
        if (bytes > size_) {
            free(data_);
            data_ = nullptr;
            size_ = 0;
            bytes = (bytes + 4095) / 4096 * 4096;
            data_ = static_cast<char*>(aligned_alloc(64, bytes));
            if (!data_) throw std::bad_alloc();
            size_ = bytes;
        }
        return data_;
    }

   private:
    char* data_ = nullptr;
    size_t size_ = 0;
};

template <class E>
struct Runner {
    typedef typename E::T T;
    const Arguments& in;
    const int head_dim, group, words;  // query heads per KV head; words of a key

    explicit Runner(const Arguments& arguments)
        : in(arguments),
          head_dim(arguments.head_dim),
          group(arguments.num_heads / arguments.num_kv_heads),
          words(arguments.head_dim / E::per_word) {}

    // `rows` are the query rows of one KV head: queries x group.
    struct Buffers {
        uint32_t* query;   // [heads, rows, words]
        uint32_t* keys;    // [words, TILE]
        uint32_t* values;  // [TILE / per_word, D]
        float* scores;     // [rows, TILE]
        T* weights;        // [rows, TILE]
        float* sums;       // [heads * rows, VL]: one partial sum per lane
        State part, total; // of heads * rows
    };

    Buffers buffers(Scratch& scratch, int heads, int rows) const {
        const size_t all = (size_t)heads * rows;
        size_t floats[] = {all * words,
                           (size_t)words * TILE,
                           (size_t)TILE / E::per_word * head_dim,
                           (size_t)rows * TILE,
                           (size_t)rows * TILE,
                           all * VL,
                           (size_t)state_floats((int)all, head_dim),
                           (size_t)state_floats((int)all, head_dim)};
        size_t total = 0;
        for (size_t& n : floats) {
            n = (n + 15) / 16 * 16;
            total += n;
        }
        float* p = reinterpret_cast<float*>(scratch.at_least(total * 4));
        Buffers b;
        b.query = reinterpret_cast<uint32_t*>(p);
        b.keys = reinterpret_cast<uint32_t*>(p += floats[0]);
        b.values = reinterpret_cast<uint32_t*>(p += floats[1]);
        b.scores = p += floats[2];
        b.weights = reinterpret_cast<T*>(p += floats[3]);
        b.sums = p += floats[4];
        b.part = state_at(p += floats[5], (int)all);
        b.total = state_at(p += floats[6], (int)all);
        return b;
    }

    const T* key_row(const void* cache, const int32_t* table, int kv_head, int position) const {
        int64_t block = table[position / in.block_size];
        int64_t page = block * in.num_kv_heads + kv_head;
        return static_cast<const T*>(cache) + (page * in.block_size + position % in.block_size) * head_dim;
    }

    // Pointers to the rows of positions [first, first + TILE) of one KV head; null outside [low, high): never read.
    void rows_of(const void* cache, const int32_t* table, int kv_head, int first, int low, int high,
                 const uint32_t** rows) const {
        int position = first;
        for (int i = 0; i < TILE;) {
            if (position < low || position >= high) {
                rows[i++] = nullptr;
                position++;
                continue;
            }
            int run = in.block_size - position % in.block_size;
            if (run > high - position) run = high - position;
            if (run > TILE - i) run = TILE - i;
            const T* row = key_row(cache, table, kv_head, position);
            for (int j = 0; j < run; j++) rows[i++] = reinterpret_cast<const uint32_t*>(row + (int64_t)j * head_dim);
            position += run;
        }
    }

    // The keys and values of a tile that comes later. Pages lie anywhere, so the hardware cannot guess the next one. The
    // lines are asked for evenly through the whole of this tile's work: a processor forgets what it is asked for while
    // some two dozen lines are on their way. A head of a tile is 8 * words lines: 2 * words each beside the transposed
    // keys, the weights and the values, and one per step of a product.
    struct Ahead {
        const char* caches[2];
        const int32_t* table;
        int64_t block_bytes, run_bytes;
        const char* at;  // null: there is no more
        const char* run_end;
        int block, end, which;

        void start_run() {
            at = caches[which] + table[block] * block_bytes;
            run_end = at + run_bytes;
        }
        // The next `lines` lines, for the caller to ask for; where none are left, one that is always near.
        inline __attribute__((always_inline)) const char* take(int lines) {
            static const char near[LINE_BYTES] = {};
            if (!at) return near;
            const char* from = at;
            at += LINE_BYTES * lines;
            if (__builtin_expect(at >= run_end, 0)) next_run();
            return from;
        }
        inline __attribute__((always_inline)) void ask(int lines) {
            const char* from = take(lines);
            for (int i = 0; i < lines; i++) __builtin_prefetch(from + LINE_BYTES * i, 0, IN_L2);
        }
        __attribute__((noinline)) void next_run() {
            which ^= 1;
            if (!which && ++block >= end)
                at = nullptr;
            else
                start_run();
        }
    };

    // Keys [position, position + TILE) below `high` of the task's heads.
    Ahead ahead_of(const Task& task, int position, int high) const {
        const int64_t head_bytes = (int64_t)in.block_size * head_dim * sizeof(T);
        const int last = position + TILE < high ? position + TILE : high;
        Ahead a{};
        a.caches[0] = static_cast<const char*>(in.k_cache) + task.kv_head * head_bytes;
        a.caches[1] = static_cast<const char*>(in.v_cache) + task.kv_head * head_bytes;
        a.table = in.block_tables + (int64_t)task.request * in.table_stride;
        a.block_bytes = head_bytes * in.num_kv_heads;
        a.run_bytes = head_bytes * task.num_kv_heads;
        a.block = position / in.block_size;
        a.end = (last - 1) / in.block_size + 1;
        if (last > position) a.start_run();
        return a;
    }

    // The values of a tile as [TILE / per_word, D] words: copied, for bfloat16 with two neighbouring keys interleaved.
    void pack_values(const uint32_t* const* rows, uint32_t* out, Ahead& ahead) const {
        for (int i = 0; i < TILE; i += E::per_word) {
            ahead.ask(words / 16);
            uint32_t* to = out + (int64_t)(i / E::per_word) * head_dim;
            if constexpr (E::per_word == 1) {
                if (rows[i])
                    memcpy(to, rows[i], head_dim * 4);
                else
                    memset(to, 0, head_dim * 4);
            } else {
                const uint16_t* even = reinterpret_cast<const uint16_t*>(rows[i]);
                const uint16_t* odd = reinterpret_cast<const uint16_t*>(rows[i + 1]);
                for (int d = 0; d < head_dim; d += VL) {
                    vu low = even ? widen(load_as<vh>(even + d)) : vu{};
                    vu high = odd ? widen(load_as<vh>(odd + d)) : vu{};
                    store_as(to + d, low | (high << 16));
                }
            }
        }
    }

    // Attend the task's rows to the keys of split `split`; the result goes to `b.part`.
    void attend_split(const Task& task, int split, Buffers& b, Ahead& after) const {
        const int rows = task.num_queries * group, heads = task.num_kv_heads;
        const int seq_len = in.seq_lens[task.request];
        const int query_len = in.query_start_loc[task.request + 1] - in.query_start_loc[task.request];
        const int first_own = seq_len - query_len + task.first_query;  // position of the first query
        const int last_own = first_own + task.num_queries - 1;
        const int low = in.window && first_own - in.window + 1 > 0 ? first_own - in.window + 1 : 0;
        const int high = last_own + 1;
        const int32_t* table = in.block_tables + (int64_t)task.request * in.table_stride;
        for (int r = 0; r < heads * rows; r++) b.part.maximum[r] = -INFINITY;
        memset(b.sums, 0, sizeof(float) * heads * rows * VL);
        memset(b.part.values, 0, sizeof(float) * heads * rows * head_dim);
        const int end = (split + 1) * SPLIT < high ? (split + 1) * SPLIT : high;
        int first = split * SPLIT > low / TILE * TILE ? split * SPLIT : low / TILE * TILE;
        const uint32_t* keys[TILE];
        const uint32_t* values[TILE];
        for (; first < end; first += TILE) {
            // Which rows see the whole tile is the same question for all of them but near the ends.
            const bool whole = first + TILE - 1 <= first_own && (!in.window || first > last_own - in.window);
            Ahead ahead = first + TILE < end ? ahead_of(task, first + TILE, high) : after;
            for (int head = 0; head < heads; head++) {
                rows_of(in.k_cache, table, task.kv_head + head, first, low, high, keys);
                rows_of(in.v_cache, table, task.kv_head + head, first, low, high, values);
                for (int i = 0; i < TILE; i += 16) {
                    transpose_rows(keys + i, 16, words, b.keys + i, TILE);
                    ahead.ask(words / 2);
                }
                product<E, false>(b.query + (int64_t)head * rows * words, words, rows, b.keys, TILE, words, b.scores,
                                  TILE, TILE, ahead);
                for (int r = 0; r < rows; r++) {
                    const int own = first_own + r / group;
                    ahead.ask(2 * words / rows);
                    softmax_row(b, r, head * rows + r, whole ? 0 : (in.window ? own - in.window + 1 - first : -1),
                                whole ? TILE : own + 1 - first);
                }
                pack_values(values, b.values, ahead);
                product<E, true>(reinterpret_cast<const uint32_t*>(b.weights), TILE / E::per_word, rows, b.values,
                                 head_dim, TILE / E::per_word, b.part.values + (int64_t)head * rows * head_dim, head_dim,
                                 head_dim, ahead);
            }
        }
        for (int r = 0; r < heads * rows; r++) b.part.sum[r] = sum_lanes(load_as<vf>(b.sums + r * VL));
    }

    // Turn row r of the scores into weights; keys [begin, end) of the tile are seen. Rescale what was summed so far, in
    // row `state`.
    void softmax_row(Buffers& b, int r, int state, int begin, int end) const {
        constexpr int N = TILE / VL;
        float* scores = b.scores + r * TILE;
        vf s[N];
        for (int i = 0; i < N; i++) s[i] = load_as<vf>(scores + i * VL) * in.scale;
        if (in.soft_cap > 0)
            for (int i = 0; i < N; i++) s[i] = tanh_of(s[i] / in.soft_cap) * in.soft_cap;
        if (begin > 0 || end < TILE) {
            vi lane;
            for (int i = 0; i < VL; i++) lane[i] = i;
            for (int i = 0; i < N; i++) {
                vi place = lane + i * VL;
                s[i] = select((place >= begin) & (place < end), s[i], splat(-INFINITY));
            }
        }
        vf top = s[0];
        for (int i = 1; i < N; i++) top = max_of(top, s[i]);
        const float before = b.part.maximum[state], here = max_lanes(top);
        T* weights = b.weights + r * TILE;
        if (here == -INFINITY) {  // nothing of this tile is seen
            memset(weights, 0, sizeof(T) * TILE);
            return;
        }
        const float now = here > before ? here : before;
        vf sum = load_as<vf>(b.sums + state * VL);
        if (now > before) {
            const float keep = exp_one(before - now);
            b.part.maximum[state] = now;
            sum = sum * keep;
            float* values = b.part.values + (int64_t)state * head_dim;
            for (int d = 0; d < head_dim; d += VL) store_as(values + d, load_as<vf>(values + d) * keep);
        }
        for (int i = 0; i < N; i++) {
            E::store(weights + i * VL, exp_of(s[i] - now));
            sum = sum + E::load(weights + i * VL);  // the rounded weights, so that they sum to one
        }
        store_as(b.sums + state * VL, sum);
    }

    void write(const Task& task, const State& total) const {
        const int64_t token = in.query_start_loc[task.request] + task.first_query;
        const int rows = task.num_queries * group;
        for (int r = 0; r < task.num_kv_heads * rows; r++) {
            const int64_t head = (int64_t)(task.kv_head + r / rows) * group + r % group;
            T* to = static_cast<T*>(in.output) + ((token + r % rows / group) * in.num_heads + head) * head_dim;
            const float* from = total.values + (int64_t)r * head_dim;
            const float inverse = 1.0f / total.sum[r];
            for (int d = 0; d < head_dim; d += VL) E::store(to + d, load_as<vf>(from + d) * inverse);
        }
    }

    // The keys a task looks at: [begin_of, end_of), from the start of a tile.
    int end_of(const Task& task) const {
        const int query_len = in.query_start_loc[task.request + 1] - in.query_start_loc[task.request];
        return in.seq_lens[task.request] - query_len + task.first_query + task.num_queries;
    }
    int begin_of(const Task& task) const {
        const int first_own = end_of(task) - task.num_queries;
        const int low = in.window && first_own - in.window + 1 > 0 ? first_own - in.window + 1 : 0;
        return task.first_split * SPLIT > low / TILE * TILE ? task.first_split * SPLIT : low / TILE * TILE;
    }

    // `next`: the task this thread is likely to get after this one; null: none.
    void run(const Task& task, const Task* next, Scratch& scratch, float* workspace,
             std::atomic<int32_t>* counters) const {
        const int rows = task.num_queries * group, all = task.num_kv_heads * rows;
        Buffers b = buffers(scratch, task.num_kv_heads, rows);
        const T* base = static_cast<const T*>(in.query) +
                        (in.query_start_loc[task.request] + task.first_query) * in.query_stride +
                        (int64_t)task.kv_head * group * head_dim;
        for (int h = 0; h < task.num_kv_heads; h++)
            for (int q = 0; q < task.num_queries; q++)
                memcpy(b.query + (int64_t)(h * rows + q * group) * words,
                       base + q * in.query_stride + (int64_t)h * group * head_dim, sizeof(T) * group * head_dim);
        const size_t bytes = sizeof(float) * state_floats(all, head_dim);
        for (int i = 0; i < task.num_splits; i++) {
            Ahead after{};
            if (i + 1 < task.num_splits)
                after = ahead_of(task, (task.first_split + i + 1) * SPLIT, end_of(task));
            else if (next)
                after = ahead_of(*next, begin_of(*next), end_of(*next));
            attend_split(task, task.first_split + i, b, after);
            if (i == 0)
                memcpy(b.total.maximum, b.part.maximum, bytes);
            else
                for (int r = 0; r < all; r++) merge_row(b.total, b.part, r, head_dim);
        }
        if (task.partial >= 0) {
            memcpy(workspace + task.partial, b.total.maximum, bytes);
            if (counters[task.group].fetch_sub(1, std::memory_order_acq_rel) != 1) return;
            memcpy(b.total.maximum, workspace + task.first_partial, bytes);
            for (int i = 1; i < task.all_splits; i++) {
                State part = state_at(workspace + task.first_partial + i * state_floats(all, head_dim), all);
                for (int r = 0; r < all; r++) merge_row(b.total, part, r, head_dim);
            }
        }
        write(task, b.total);
    }
};

struct Plan {
    std::vector<Task> tasks;
    std::vector<int32_t> splits_left;  // per group of tasks that share rows
    int64_t workspace_floats = 0;
};

inline Plan plan(const Arguments& in, int num_threads) {
    Plan result;
    const int group = in.num_heads / in.num_kv_heads;
    const int block = MAX_ROWS / group > 1 ? MAX_ROWS / group : 1;
    const bool by_head = in.num_requests < 4 * num_threads;
    // Long tasks first, and of those the last queries (most keys) first: the end of the step is evenly shared.
    for (int pass = 0; pass < 2; pass++)
        for (int r = 0; r < in.num_requests; r++) {
            const int query_len = in.query_start_loc[r + 1] - in.query_start_loc[r];
            const int seq_len = in.seq_lens[r];
            const bool few = query_len <= FEW_QUERIES;
            if (query_len < 1 || (pass == 0) == few) continue;
            const int step = few ? query_len : block;
            const int heads = few && !by_head ? in.num_kv_heads : 1;
            for (int first = (query_len - 1) / step * step; first >= 0; first -= step) {
                const int count = query_len - first < step ? query_len - first : step;
                const int own = seq_len - query_len + first;
                const int low = in.window && own - in.window + 1 > 0 ? own - in.window + 1 : 0;
                const int begin = low / SPLIT, end = (own + count - 1) / SPLIT + 1;
                for (int h = 0; h < in.num_kv_heads; h += heads) {
                    Task task{r, h, heads, first, count, begin, end - begin, -1, -1, -1, end - begin};
                    if (!few || end - begin == 1) {
                        result.tasks.push_back(task);
                        continue;
                    }
                    task.group = (int32_t)result.splits_left.size();
                    task.first_partial = result.workspace_floats;
                    task.num_splits = 1;
                    for (int s = begin; s < end; s++) {
                        task.first_split = s;
                        task.partial = result.workspace_floats;
                        result.workspace_floats += state_floats(heads * count * group, in.head_dim);
                        result.tasks.push_back(task);
                    }
                    result.splits_left.push_back(end - begin);
                }
            }
        }
    return result;
}

template <class E>
void run_plan(const Arguments& in, const Plan& work, int num_threads) {
    static thread_local Scratch shared;  // the caller's; the helpers get its address
    const int num_tasks = (int)work.tasks.size();
    if (!num_tasks) return;
    const size_t counter_bytes = (sizeof(std::atomic<int32_t>) * work.splits_left.size() + 63) / 64 * 64;
    char* memory = shared.at_least(counter_bytes + sizeof(float) * (size_t)work.workspace_floats + 64);
    auto* counters = reinterpret_cast<std::atomic<int32_t>*>(memory);
    for (size_t i = 0; i < work.splits_left.size(); i++) new (counters + i) std::atomic<int32_t>(work.splits_left[i]);
    auto* workspace = reinterpret_cast<float*>(memory + counter_bytes);
    const Runner<E> runner(in);
    pool::each(num_tasks, num_threads, [&](int64_t i) {
        static thread_local Scratch scratch;
        // What this thread gets next if all are equally fast: its first tile is asked for at the end of this task.
        const Task* next = i + num_threads < num_tasks ? &work.tasks[i + num_threads] : nullptr;
        runner.run(work.tasks[i], next, scratch, workspace, counters);
    });
}

template <class E>
void run(const Arguments& in, int num_threads) {
    run_plan<E>(in, plan(in, num_threads), num_threads);
}

}  // namespace attention
