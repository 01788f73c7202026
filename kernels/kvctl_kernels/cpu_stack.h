// All layers of a decoder in one call: what the single operations do, in their order, without a return to Python between.
//
// Every number goes through the same functions as in the single operations, and those treat each row on its own:
// results are theirs, bit for bit. Intermediate rows live in one buffer of the calling thread.
#pragma once

#include "cpu_attention.h"
#include "cpu_elementwise.h"
#include "cpu_linear.h"

namespace stack {

struct Linear {
    const uint32_t* packed;
    const float* bias;  // null: none
};

struct Layer {
    const float* input_norm;
    const float* q_norm;  // null: none; k_norm likewise
    const float* k_norm;
    const float* attention_out_norm;  // null: none
    const float* mlp_norm;
    const float* mlp_out_norm;  // null: none
    Linear qkv, output, gate_up, down;
    const float* cos_sin;
    void* k_cache;
    void* v_cache;
    int32_t window;  // 0: none
    int32_t group;   // whose block table and slots it uses
};

struct Model {
    const Layer* layers;
    int32_t num_layers, num_groups;
    int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, rot_dim, block_size;
    int32_t is_gelu;
    float eps, scale, soft_cap;  // soft_cap 0: none
};

struct Group {
    const int32_t* block_tables;
    const int64_t* slots;
    int64_t table_stride;
};

struct Step {
    const void* x;   // [T, hidden_size]: embeddings
    void* added;     // [T, hidden_size]: what the last layer adds; its first num_rows are the result
    void* residual;  // [T, hidden_size]: the stream before it
    const int64_t* rows;  // [num_rows], rising: whose result is wanted, each the last token of its request
    int64_t num_rows;     // num_tokens: all, and `rows` is not read
    const int64_t* positions;
    const int32_t* query_start_loc;
    const int32_t* seq_lens;
    const Group* groups;
    int64_t num_tokens;
    int32_t num_requests;
};

template <class E>
struct Pass {
    typedef typename E::T T;
    const Model& model;
    const Step& step;
    const int num_threads;
    int64_t num_tokens;  // that the rest of the layer works on

    void norm(const void* x, const void* residual, const float* weight, void* out) const {
        elementwise::rms_norm<E>((const T*)x, model.hidden_size, (const T*)residual, (T*)step.residual,
                                 weight, (T*)out, num_tokens, 1, 0, model.hidden_size, model.eps,
                                 num_threads);
    }

    void head_norm(const T* x, int64_t x_stride, int heads, const float* weight, T* out) const {
        elementwise::rms_norm<E>(x, x_stride, nullptr, nullptr, weight, out, num_tokens, heads,
                                 model.head_dim, model.head_dim, model.eps, num_threads);
    }

    void multiply(const void* x, int64_t inputs, const Linear& by, void* y, int64_t outputs) const {
        const int64_t words = inputs / E::per_word;
        linear::multiply(
            linear::Product<E>{(const uint32_t*)x, words, by.packed, words, by.bias, (T*)y, outputs, outputs},
            num_tokens, num_threads);
    }

    // Keep the wanted rows only, at the front.
    void keep(T* data, int64_t stride, int64_t width) const {
        for (int64_t i = 0; i < step.num_rows; i++)
            if (step.rows[i] != i) memmove(data + i * stride, data + step.rows[i] * stride, sizeof(T) * width);
    }

    // Where each request's wanted row begins among them: it has one or none.
    std::vector<int32_t> starts_of_rows() const {
        std::vector<int32_t> starts{0};
        int64_t i = 0;
        for (int32_t r = 0; r < step.num_requests; r++) {
            if (i < step.num_rows && step.rows[i] < step.query_start_loc[r + 1]) i++;
            starts.push_back((int32_t)i);
        }
        return starts;
    }

    void run() {
        static thread_local attention::Scratch memory;
        const int64_t tokens = step.num_tokens, hidden = model.hidden_size, inner = model.intermediate_size;
        const int64_t query_size = (int64_t)model.num_heads * model.head_dim;
        const int64_t kv_size = (int64_t)model.num_kv_heads * model.head_dim;
        const int64_t qkv_size = query_size + 2 * kv_size;
        const int64_t sizes[] = {hidden, qkv_size, query_size + kv_size, query_size, 2 * inner, inner};
        T* rows[6];
        int64_t total = 0;
        for (int64_t size : sizes) total += (tokens * size * (int64_t)sizeof(T) + 63) / 64 * 64;
        char* at = memory.at_least((size_t)total);
        for (int i = 0; i < 6; i++) {
            rows[i] = reinterpret_cast<T*>(at);
            at += (tokens * sizes[i] * (int64_t)sizeof(T) + 63) / 64 * 64;
        }
        T *normed = rows[0], *qkv = rows[1], *heads = rows[2], *attended = rows[3], *gate_up = rows[4], *gated = rows[5];

        std::vector<attention::Plan> plans(model.num_groups);
        attention::Arguments attend{};
        attend.query_start_loc = step.query_start_loc;
        attend.seq_lens = step.seq_lens;
        attend.output = attended;
        attend.num_requests = step.num_requests;
        attend.num_heads = model.num_heads;
        attend.num_kv_heads = model.num_kv_heads;
        attend.head_dim = model.head_dim;
        attend.block_size = model.block_size;
        attend.scale = model.scale;
        attend.soft_cap = model.soft_cap;

        std::vector<int32_t> starts;
        memcpy(step.residual, step.x, sizeof(T) * tokens * hidden);
        for (int i = 0; i < model.num_layers; i++) {
            const Layer& layer = model.layers[i];
            if (i == 0)
                norm(step.x, nullptr, layer.input_norm, normed);
            else
                norm(step.added, step.residual, layer.input_norm, normed);
            multiply(normed, hidden, layer.qkv, qkv, qkv_size);

            T *query = qkv, *key = qkv + query_size;
            int64_t query_stride = qkv_size, key_stride = qkv_size;
            if (layer.q_norm) {
                query = heads;
                key = heads + tokens * query_size;
                query_stride = query_size;
                key_stride = kv_size;
                head_norm(qkv, qkv_size, model.num_heads, layer.q_norm, query);
                head_norm(qkv + query_size, qkv_size, model.num_kv_heads, layer.k_norm, key);
            }
            const Group& group = step.groups[layer.group];
            elementwise::rotary<E>(
                elementwise::Rotary{query, key, qkv + query_size + kv_size, layer.k_cache, layer.v_cache,
                                    step.positions, layer.cos_sin, group.slots, query_stride, key_stride, qkv_size,
                                    tokens, model.num_heads, model.num_kv_heads, model.head_dim, model.rot_dim,
                                    model.block_size},
                num_threads);
            attend.query = query;
            attend.query_stride = query_stride;
            attend.k_cache = layer.k_cache;
            attend.v_cache = layer.v_cache;
            attend.block_tables = group.block_tables;
            attend.table_stride = group.table_stride;
            attend.window = layer.window;
            if (i + 1 == model.num_layers && step.num_rows < tokens) {
                // Keys and values of all tokens are stored; nobody reads what else this layer makes of the other ones.
                keep(query, query_stride, query_size);
                keep(static_cast<T*>(step.residual), hidden, hidden);
                starts = starts_of_rows();
                attend.query_start_loc = starts.data();
                plans[layer.group] = {};
                num_tokens = step.num_rows;
            }
            attention::Plan& plan = plans[layer.group];  // one window per group, so one plan for all its layers
            if (plan.tasks.empty()) plan = attention::plan(attend, num_threads);
            attention::run_plan<E>(attend, plan, num_threads);

            multiply(attended, query_size, layer.output, step.added, hidden);
            if (layer.attention_out_norm) norm(step.added, nullptr, layer.attention_out_norm, step.added);
            norm(step.added, step.residual, layer.mlp_norm, normed);
            multiply(normed, hidden, layer.gate_up, gate_up, 2 * inner);
            if (model.is_gelu)
                elementwise::gate<E, true>(gate_up, 2 * inner, gated, num_tokens, inner, num_threads);
            else
                elementwise::gate<E, false>(gate_up, 2 * inner, gated, num_tokens, inner, num_threads);
            multiply(gated, inner, layer.down, step.added, hidden);
            if (layer.mlp_out_norm) norm(step.added, nullptr, layer.mlp_out_norm, step.added);
        }
    }
};

}  // namespace stack
