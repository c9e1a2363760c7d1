/* Rows: norm, rotary turning, gated activation and softmax over rows of numbers, forward and backward, for the trainer.
 * One row is one token (or one head of it); widths are multiples of 16 (rotary ones of 32: their callers see to it).
 * Sums are float32; what torch's bfloat16 path rounds in between is rounded here too. */
#pragma once
#include "lanes.h"

/* y = x · rstd · weight; returns rstd. */
INLINE float norm_row(const real *x, const real *weight, int64_t width, float eps, real *y) {
    v16 even = {0}, odd = {0};
    for (int64_t e = 0; e + 2 * LANES <= width; e += 2 * LANES) {
        v16 a = load_real(x + e), b = load_real(x + e + LANES);
        even += a * a, odd += b * b;
    }
    if (width % (2 * LANES)) {
        v16 a = load_real(x + width - LANES);
        even += a * a;
    }
    float rstd = 1.0f / sqrtf(sum_of(even + odd) / (float)width + eps);
    for (int64_t e = 0; e < width; e += LANES)
        store_real(y + e, rounded(load_real(x + e) * rstd) * load_real(weight + e));
    return rstd;
}

/* grad_x = rstd · (g·w - x̂ · mean(g·w·x̂)) + through, x̂ = x · rstd; grad_weight += g · x̂. Null `through` is zero. */
INLINE void norm_row_backward(const real *grad, const real *x, const real *weight, float rstd, const real *through,
                              int64_t width, real *grad_x, float *grad_weight) {
    v16 sum = {0};
    for (int64_t e = 0; e < width; e += LANES) {
        v16 g = load_real(grad + e), hat = load_real(x + e) * rstd;
        store(grad_weight + e, load(grad_weight + e) + g * hat);
        sum += g * load_real(weight + e) * hat;
    }
    float mean = sum_of(sum) / (float)width;
    for (int64_t e = 0; e < width; e += LANES) {
        v16 y = (load_real(grad + e) * load_real(weight + e) - load_real(x + e) * rstd * mean) * rstd;
        if (through) y += load_real(through + e);
        store_real(grad_x + e, y);
    }
}

/* y = x · cos + swap(x) · sin, sin negated in its first half; `back` turns the other way. */
INLINE void turn_row(const real *x, const real *cosine, const real *sine, int64_t dim, int back, real *y) {
    int64_t half = dim / 2;
    for (int64_t f = 0; f < half; f += LANES) {
        v16 first = load_real(x + f), second = load_real(x + half + f);
        v16 c = load_real(cosine + f), s = load_real(sine + half + f);
        if (back) s = -s;
        store_real(y + f, rounded(first * c) - second * s);
        store_real(y + half + f, rounded(second * c) + first * s);
    }
}

INLINE void silu_row(const real *gate, const real *up, int64_t width, real *y) {
    for (int64_t m = 0; m < width; m += LANES) {
        v16 g = load_real(gate + m);
        store_real(y + m, rounded(g / (1.0f + exp_of(-g))) * load_real(up + m));
    }
}

INLINE void silu_row_backward(
    const real *grad, const real *gate, const real *up, int64_t width, real *grad_gate, real *grad_up) {
    for (int64_t m = 0; m < width; m += LANES) {
        v16 g = load_real(gate + m), upstream = load_real(grad + m), sigmoid = 1.0f / (1.0f + exp_of(-g));
        store_real(grad_up + m, upstream * g * sigmoid);
        store_real(grad_gate + m, upstream * load_real(up + m) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
    }
}

/* Of logits · inverse: log Σ exp, and the entropy of their softmax. */
INLINE void softmax_row(const real *logits, int64_t width, float inverse, float *total, float *entropy) {
    v16 most16 = spread(-INFINITY), sum = {0}, mean = {0};
    for (int64_t v = 0; v < width; v += LANES) most16 = larger(most16, load_real(logits + v) * inverse);
    float most = max_of(most16);
    for (int64_t v = 0; v < width; v += LANES) {
        v16 x = load_real(logits + v) * inverse - most, p = exp_of(x);
        sum += p, mean += p * x;
    }
    float whole = sum_of(sum), log_whole = logf(whole);
    *total = most + log_whole;
    *entropy = log_whole - sum_of(mean) / whole;
}
