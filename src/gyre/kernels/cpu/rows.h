/* Rows: norm, rotary turning, gated activation and softmax over rows of numbers, forward and backward, for the trainer.
 * One row is one token (or one head of it); widths are multiples of 16 (rotary ones of 32: their callers see to it).
 * Sums are float32; what torch's bfloat16 path rounds in between is rounded here too. */
#pragma once
#include "lanes.h"

/* y = x · rstd · weight; returns rstd. */
INLINE float norm_row(const real *x, const real *weight, int64_t width, float eps, real *y) {
    vfloat even = {0}, odd = {0};
    for (int64_t e = 0; e + 2 * LANES <= width; e += 2 * LANES) {
        vfloat a = load_real(x + e), b = load_real(x + e + LANES);
        even = fused(a, a, even), odd = fused(b, b, odd);
    }
    if (width % (2 * LANES)) {
        vfloat a = load_real(x + width - LANES);
        even = fused(a, a, even);
    }
    float rstd = 1.0f / sqrtf(sum_of(even + odd) / (float)width + eps);
    for (int64_t e = 0; e < width; e += LANES)
        store_real(y + e, rounded(load_real(x + e) * rstd) * load_real(weight + e));
    return rstd;
}

/* grad_x = rstd · (g·w - x̂ · mean(g·w·x̂)) + through, x̂ = x · rstd; grad_weight += g · x̂. Null `through` is zero. */
INLINE void norm_row_backward(const real *grad, const real *x, const real *weight, float rstd, const real *through,
                              int64_t width, real *grad_x, float *grad_weight) {
    vfloat sum = {0};
    for (int64_t e = 0; e < width; e += LANES) {
        vfloat g = load_real(grad + e), hat = load_real(x + e) * rstd;
        store(grad_weight + e, fused(g, hat, load(grad_weight + e)));
        sum = fused(g * load_real(weight + e), hat, sum);
    }
    float mean = sum_of(sum) / (float)width;
    for (int64_t e = 0; e < width; e += LANES) {
        vfloat y = (load_real(grad + e) * load_real(weight + e) - load_real(x + e) * rstd * mean) * rstd;
        if (through) y += load_real(through + e);
        store_real(grad_x + e, y);
    }
}

/* y = x · cos + swap(x) · sin, sin negated in its first half; `back` turns the other way. */
INLINE void turn_row(const real *x, const real *cosine, const real *sine, int64_t dim, int back, real *y) {
    int64_t half = dim / 2;
    for (int64_t f = 0; f < half; f += LANES) {
        vfloat first = load_real(x + f), second = load_real(x + half + f);
        vfloat c = load_real(cosine + f), s = load_real(sine + half + f);
        if (back) s = -s;
        store_real(y + f, rounded(first * c) - second * s);
        store_real(y + half + f, rounded(second * c) + first * s);
    }
}

INLINE void silu_row(const real *gate, const real *up, int64_t width, real *y) {
    for (int64_t m = 0; m < width; m += LANES) {
        vfloat g = load_real(gate + m);
        store_real(y + m, rounded(g / (1.0f + exp_of(-g))) * load_real(up + m));
    }
}

INLINE void silu_row_backward(
    const real *grad, const real *gate, const real *up, int64_t width, real *grad_gate, real *grad_up) {
    for (int64_t m = 0; m < width; m += LANES) {
        vfloat g = load_real(gate + m), upstream = load_real(grad + m), sigmoid = 1.0f / (1.0f + exp_of(-g));
        store_real(grad_up + m, upstream * g * sigmoid);
        store_real(grad_gate + m, upstream * load_real(up + m) * sigmoid * (1.0f + g * (1.0f - sigmoid)));
    }
}

/* Of logits · inverse: log Σ exp, the log-prob of `target`, and the entropy of their softmax. Differences to the largest
 * logit are taken first: they are exact or small, so that large logits cost no digits and no log-prob is above 0. */
INLINE void softmax_row(const real *logits, int64_t width, float inverse, int64_t target, float *total, float *logprob,
                        float *entropy) {
    vfloat most_of_lane = spread(-INFINITY), sum = {0}, mean = {0};
    for (int64_t v = 0; v < width; v += LANES) most_of_lane = larger(most_of_lane, load_real(logits + v));
    float most = max_of(most_of_lane);
    for (int64_t v = 0; v < width; v += LANES) {
        vfloat x = (load_real(logits + v) - most) * inverse, p = exp_of(x);
        sum += p, mean = fused(p, x, mean);
    }
    float whole = sum_of(sum), log_whole = logf(whole);
    *total = most * inverse + log_whole;
    *logprob = (widen(logits[target]) - most) * inverse - log_whole;
    *entropy = log_whole - sum_of(mean) / whole;
}
