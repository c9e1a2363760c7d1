/* One token of a row of logits: first best, or an inverse-CDF draw in token order, and its log-probs. Weights are
 * float32, sums float64. A row whose logits are not finite gets NaN as its log-probs. */
#pragma once
#include "lanes.h"

#define SUM_TOKENS 256 /* tokens whose weights are summed before the sums are searched */

/* Logits from `v` on, -inf past the end. */
INLINE vfloat logits_at(const float *logits, int64_t vocab, int64_t v) {
    return load_some(logits + v, vocab - v, -INFINITY);
}

static int64_t first_equal(const float *logits, int64_t vocab, float wanted) {
    for (int64_t v = 0; v < vocab; v++)
        if (logits[v] == wanted) return v;
    return vocab - 1;
}

/* Σ exp((logit - most) · inverse) by SUM_TOKENS into sums, and the whole. */
static double weigh(const float *logits, int64_t vocab, float most, float inverse, double *sums) {
    double whole = 0.0;
    for (int64_t begin = 0; begin < vocab; begin += SUM_TOKENS) {
        int64_t end = begin + SUM_TOKENS < vocab ? begin + SUM_TOKENS : vocab;
        vdouble sum = {0};
        for (int64_t v = begin; v < end; v += LANES) {
            vfloat w = exp_of((logits_at(logits, vocab, v) - most) * inverse);
            sum += low_half(w) + high_half(w);
        }
        double part = sum_of_doubles(sum);
        if (sums) sums[begin / SUM_TOKENS] = part;
        whole += part;
    }
    return whole;
}

/* The first token at which the running sum passes `wanted`; rounding never runs past the last token with weight. */
static int64_t draw(
    const float *logits, int64_t vocab, float most, float inverse, const double *sums, double wanted, float *weight) {
    int64_t parts = (vocab + SUM_TOKENS - 1) / SUM_TOKENS, part = 0, found = 0;
    double passed = 0.0;
    while (part + 1 < parts && passed + sums[part] <= wanted) passed += sums[part++];
    *weight = 0.0f;
    for (int64_t v = part * SUM_TOKENS; v < (part + 1) * SUM_TOKENS && v < vocab; v += LANES) {
        vfloat w = exp_of((logits_at(logits, vocab, v) - most) * inverse);
        for (int i = 0; i < LANES && v + i < vocab; i++) {
            if (w[i] > 0.0f) found = v + i, *weight = w[i];
            passed += w[i];
            if (passed > wanted) return found;
        }
    }
    return found;
}

static void choose_token(
    const float *logits, int64_t vocab, int greedy, float inverse, double uniform, double *sums, int32_t *token,
    float *logprob, float *raw) {
    vfloat most_of_lane = spread(-INFINITY), unsound = {0};
    for (int64_t v = 0; v < vocab; v += LANES) {
        vfloat x = logits_at(logits, vocab, v);
        most_of_lane = larger(most_of_lane, x);
        unsound += v + LANES <= vocab ? x - x : (vfloat){0};
    }
    for (int64_t v = vocab / LANES * LANES; v < vocab; v++) unsound[0] += logits[v] - logits[v];
    float most = max_of(most_of_lane);
    if (!(sum_of(unsound) == 0.0f)) {
        *token = 0, *logprob = NAN, *raw = NAN;
        return;
    }
    if (greedy) {
        *token = (int32_t)first_equal(logits, vocab, most), *logprob = 0.0f;
        *raw = (float)-log(weigh(logits, vocab, most, 1.0f, 0));
        return;
    }
    float weight;
    double whole = weigh(logits, vocab, most, inverse, sums);
    *token = (int32_t)draw(logits, vocab, most, inverse, sums, uniform * whole, &weight);
    *logprob = *raw = (float)log(weight / whole);
    if (inverse != 1.0f)
        *raw = (float)((double)(logits[*token] - most) - log(weigh(logits, vocab, most, 1.0f, 0)));
}
