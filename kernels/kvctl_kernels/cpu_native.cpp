// The native CPU kernels behind a C interface: compiled at first use by cpu_build.py, loaded with ctypes.
//
// Depends on nothing but the compiler. Takes raw pointers, sizes in elements and the number of threads; checks nothing:
// cpu_ops.py does. dtype: 0 float32, 1 bfloat16. How the parts work is said in the headers.
#include "cpu_attention.h"
#include "cpu_elementwise.h"
#include "cpu_linear.h"
#include "cpu_sampling.h"
#include "cpu_stack.h"

#define BY_DTYPE(call)        \
    do {                      \
        if (dtype == 1) {     \
            typedef BF16 E;   \
            call;             \
        } else {              \
            typedef F32 E;    \
            call;             \
        }                     \
    } while (0)

extern "C" {

// What it was compiled for, for logs.
const char* kvctl_describe() {
#if defined(KV_AVX512) && defined(__AVX512BF16__)
    return "avx512-bf16";
#elif defined(KV_AVX512)
    return "avx512";
#elif defined(__AVX2__)
    return "avx2";
#elif defined(__aarch64__)
    return "aarch64";
#else
    return "generic";
#endif
}

void kvctl_paged_attention(int dtype, const attention::Arguments* arguments, int num_threads) {
    BY_DTYPE(attention::run<E>(*arguments, num_threads));
}

void kvctl_rotary(int dtype, const elementwise::Rotary* arguments, int num_threads) {
    BY_DTYPE(elementwise::rotary<E>(*arguments, num_threads));
}

void kvctl_rms_norm(int dtype, const void* x, int64_t x_stride, const void* residual, void* new_residual,
                    const float* weight, void* out, int64_t rows, int64_t inner, int64_t x_inner_stride, int64_t width,
                    float eps, int num_threads) {
    BY_DTYPE(elementwise::rms_norm<E>((const E::T*)x, x_stride, (const E::T*)residual, (E::T*)new_residual,
                                      weight, (E::T*)out, rows, inner, x_inner_stride, width, eps,
                                      num_threads));
}

void kvctl_gate(int dtype, int is_gelu, const void* x, int64_t x_stride, void* out, int64_t rows, int64_t width,
                int num_threads) {
    if (is_gelu)
        BY_DTYPE((elementwise::gate<E, true>((const E::T*)x, x_stride, (E::T*)out, rows, width, num_threads)));
    else
        BY_DTYPE((elementwise::gate<E, false>((const E::T*)x, x_stride, (E::T*)out, rows, width, num_threads)));
}

void kvctl_argmax(int dtype, const void* x, int64_t x_stride, int64_t* out, int64_t rows, int64_t width,
                  int num_threads) {
    BY_DTYPE(elementwise::argmax<E>((const E::T*)x, x_stride, out, rows, width, num_threads));
}

void kvctl_draw(const float* logits, int64_t stride, int64_t rows, int64_t width, const int64_t* keys,
                const int64_t* top_k, const float* top_p, const float* min_p, int64_t* out, int num_threads) {
    sampling::draw(logits, stride, rows, width, keys, top_k, top_p, min_p, out, num_threads);
}

int64_t kvctl_packed_words(int64_t outputs, int64_t words) { return linear::panels(outputs) * linear::PANEL * words; }

void kvctl_pack(const void* weight, int64_t outputs, int64_t words, void* packed, int num_threads) {
    linear::pack((const uint32_t*)weight, outputs, words, (uint32_t*)packed, num_threads);
}

// Rows indices[0..count) of the packed weight, out [count, words]. Returns the first index out of range, or -1.
int64_t kvctl_unpack_rows(const void* packed, int64_t outputs, int64_t words, const int64_t* indices, int64_t count,
                          void* out, int num_threads) {
    for (int64_t i = 0; i < count; i++)
        if (indices[i] < 0 || indices[i] >= outputs) return i;
    elementwise::each_row(count, words * 8, num_threads, [&](int64_t i) {
        linear::unpack_row((const uint32_t*)packed, words, indices[i], (uint32_t*)out + i * words);
    });
    return -1;
}

// x_stride in words.
void kvctl_linear(int dtype, const void* x, int64_t x_stride, int64_t rows, const void* packed, int64_t words,
                  const float* bias, void* y, int64_t y_stride, int64_t outputs, int num_threads) {
    BY_DTYPE(linear::multiply(linear::Product<E>{(const uint32_t*)x, x_stride, (const uint32_t*)packed, words, bias,
                                                 (E::T*)y, y_stride, outputs},
                              rows, num_threads));
}

void kvctl_stack(int dtype, const stack::Model* model, const stack::Step* step, int num_threads) {
    BY_DTYPE((stack::Pass<E>{*model, *step, num_threads, step->num_tokens}.run()));
}

}  // extern "C"
