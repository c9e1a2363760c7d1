/* The trainer's kernels: what lies between the matrix products of a packed chunk, each as one pass over memory, forward
 * and backward. In: tensors' addresses and sizes. Out: tensors. Caller: kernels.cpu.chunks, through ctypes.
 * Sums over tokens (gradients of norm weights) are kept per thread and added in the threads' order. */
#include "rows.h"
#include "scores.h"
#if defined(_OPENMP)
#include <omp.h>
#else
static int omp_get_thread_num(void) { return 0; }
#endif

#define EACH _Pragma("omp parallel for schedule(static) num_threads((int)threads)")

void gyre_norm(int64_t threads, int64_t rows, int64_t width, float eps, const real *x, const real *weight, real *y,
               float *rstd) {
    EACH for (int64_t n = 0; n < rows; n++) rstd[n] = norm_row(x + n * width, weight, width, eps, y + n * width);
}

/* partial[threads][width] must be zero. */
void gyre_norm_backward(int64_t threads, int64_t rows, int64_t width, const real *grad, const real *x, const real *weight,
                        const float *rstd, const real *through, real *grad_x, float *partial) {
    EACH for (int64_t n = 0; n < rows; n++)
        norm_row_backward(grad + n * width, x + n * width, weight, rstd[n], through ? through + n * width : 0, width,
                          grad_x + n * width, partial + omp_get_thread_num() * width);
}

/* qkv[T][(H + 2K)·D] → q[T][H][D] and k[T][K][D], normed where there are weights, and turned. */
void gyre_heads(int64_t threads, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim, float eps,
                const real *qkv, const real *q_norm, const real *k_norm, const real *cosine, const real *sine, real *q,
                real *k, float *rstd) {
    int64_t turning = heads + kv_heads;
    EACH for (int64_t t = 0; t < tokens; t++)
        for (int64_t j = 0; j < turning; j++) {
            const real *from = qkv + (t * (turning + kv_heads) + j) * dim, *norm = j < heads ? q_norm : k_norm;
            real *to = j < heads ? q + (t * heads + j) * dim : k + (t * kv_heads + j - heads) * dim;
            if (norm) rstd[t * turning + j] = norm_row(from, norm, dim, eps, to);
            turn_row(norm ? to : from, cosine + t * dim, sine + t * dim, dim, 0, to);
        }
}

/* Gradients of q, k and v → that of qkv; partial[threads][2][D] must be zero. grad_v is `value_stride` from token to
 * token. */
void gyre_heads_backward(int64_t threads, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
                         int64_t value_stride, const real *grad_q, const real *grad_k, const real *grad_v,
                         const real *qkv, const real *q_norm, const real *k_norm, const float *rstd, const real *cosine,
                         const real *sine, real *grad_qkv, float *partial) {
    int64_t turning = heads + kv_heads;
    EACH for (int64_t t = 0; t < tokens; t++) {
        for (int64_t j = 0; j < turning; j++) {
            int64_t at = (t * (turning + kv_heads) + j) * dim;
            const real *from = j < heads ? grad_q + (t * heads + j) * dim : grad_k + (t * kv_heads + j - heads) * dim;
            const real *norm = j < heads ? q_norm : k_norm;
            turn_row(from, cosine + t * dim, sine + t * dim, dim, 1, grad_qkv + at);
            if (norm)
                norm_row_backward(grad_qkv + at, qkv + at, norm, rstd[t * turning + j], 0, dim, grad_qkv + at,
                                  partial + (2 * omp_get_thread_num() + (j >= heads)) * dim);
        }
        memcpy(grad_qkv + (t * (turning + kv_heads) + turning) * dim, grad_v + t * value_stride,
               sizeof(real) * kv_heads * dim);
    }
}

void gyre_silu(int64_t threads, int64_t tokens, int64_t width, const real *gate_up, real *y) {
    EACH for (int64_t t = 0; t < tokens; t++)
        silu_row(gate_up + 2 * t * width, gate_up + (2 * t + 1) * width, width, y + t * width);
}

void gyre_silu_backward(int64_t threads, int64_t tokens, int64_t width, const real *grad, const real *gate_up,
                        real *grad_gate_up) {
    EACH for (int64_t t = 0; t < tokens; t++)
        silu_row_backward(grad + t * width, gate_up + 2 * t * width, gate_up + (2 * t + 1) * width, width,
                          grad_gate_up + 2 * t * width, grad_gate_up + (2 * t + 1) * width);
}

void gyre_logprobs(int64_t threads, int64_t rows, int64_t width, const real *logits, const float *temperature,
                   const int64_t *target, float *logprob, float *entropy, float *total) {
    EACH for (int64_t n = 0; n < rows; n++)
        softmax_row(logits + n * width, width, 1.0f / temperature[n], target[n], total + n, logprob + n, entropy + n);
}

/* logits become their own gradient: -p · (scale + bonus · (log p + entropy)), and at_target at the target. Null `bonus`
 * is zero. `total` is log Σ exp of the logits / temperature. */
void gyre_logits_gradient(int64_t threads, int64_t rows, int64_t width, real *logits, const float *temperature,
                          const int64_t *target, const float *total, const float *scale, const float *at_target,
                          const float *bonus, const float *entropy) {
    EACH for (int64_t n = 0; n < rows; n++) {
        float inverse = 1.0f / temperature[n];
        real *row = logits + n * width;
        if (bonus)
            for (int64_t v = 0; v < width; v += LANES) {
                vfloat log_p = load_real(row + v) * inverse - total[n];
                store_real(row + v, exp_of(log_p) * -(scale[n] + bonus[n] * (log_p + entropy[n])));
            }
        else
            for (int64_t v = 0; v < width; v += LANES)
                store_real(row + v, exp_of(load_real(row + v) * inverse - total[n]) * -scale[n]);
        row[target[n]] = narrow(at_target[n]);
    }
}

int64_t gyre_attention_scratch(int64_t longest, int64_t dim, int64_t group) {
    return up_to(4 * scores_scratch(longest, dim, group) + 4096, 4096);
}

void gyre_attention(int64_t threads, const Attention *a, int64_t sequences, const int32_t *offsets, char *scratch,
                    int64_t scratch_bytes, int64_t backward) {
#pragma omp parallel for schedule(dynamic, 1) num_threads((int)threads)
    for (int64_t task = 0; task < sequences * a->kv_heads; task++) {
        int64_t sequence = task / a->kv_heads, start = offsets[sequence], length = offsets[sequence + 1] - start;
        char *own = scratch + omp_get_thread_num() * scratch_bytes;
        if (length == 0) continue;
        if (backward) attend_backward(a, start, length, task % a->kv_heads, own);
        else attend_forward(a, start, length, task % a->kv_heads, own);
    }
}
