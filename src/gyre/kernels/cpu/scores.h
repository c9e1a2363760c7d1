/* Scores: causal attention of one packed sequence and kv head, forward and backward, for the trainer. All products run
 * through matmul.h with LANES queries in lanes, by blocks of 64 queries; the softmax goes down the keys, so that it is
 * sums and maxima of whole vectors. Softmax weights and their gradients are rounded to `real` as factors of products.
 *
 * Q queries of a block, C the keys that the block sees, L keys of the sequence, D head dim. */
#pragma once
#include "matmul.h"

#define QUERIES 64
#define QUERY_BLOCKS (QUERIES / LANES)

typedef struct {
    int64_t tokens, heads, kv_heads, dim, value_stride; /* numbers from token to token of v */
    const real *q, *k, *v;                              /* [T][H][D], [T][K][D], [T][…] */
    real *out;                                          /* [T][H][D] */
    float *log_total;                                   /* [T][H] log Σ exp of the scaled scores */
    const real *grad_out;
    real *grad_q, *grad_k, *grad_v;                     /* [T][H][D], [T][K][D], [T][K][D] */
} Attention;

INLINE int64_t up_to(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }

/* rows[count][D], `stride` apart → panel [block][D / PAIR][lane]; lanes past the end are zero. */
static void pack_lanes(const real *rows, int64_t stride, int64_t count, int64_t dim, uint32_t *panel) {
    int64_t steps = dim / PAIR;
    for (int64_t base = 0; base < count; base += LANES)
        for (int64_t d = 0; d < steps; d += LANES) {
            vfloat r[LANES];
            for (int i = 0; i < LANES; i++)
                r[i] = base + i < count ? load((const float *)(rows + (base + i) * stride) + d) : (vfloat){0};
            transpose(r);
            for (int i = 0; i < LANES; i++) *(vfloat *)(panel + (base * steps + (d + i) * LANES)) = r[i];
        }
}

/* rows[count][D] → panel with features in lanes: [D / LANES][count / PAIR][lane], two rows in a lane where it holds two;
 * rows up to `padded` are zero. */
static void pack_features(const real *rows, int64_t stride, int64_t count, int64_t padded, int64_t dim,
                          uint32_t *panel) {
    for (int64_t d = 0; d < dim; d += LANES)
        for (int64_t i = 0; i < padded; i += 2) {
            vfloat first = i < count ? load_real(rows + i * stride + d) : (vfloat){0};
            vfloat second = i + 1 < count ? load_real(rows + (i + 1) * stride + d) : (vfloat){0};
            pack(panel + (d / LANES * (padded / PAIR) + i / PAIR) * LANES, first, second);
        }
}

/* rows[count][D] → columns[D][padded]; past the end zero. */
static void pack_columns(const real *rows, int64_t stride, int64_t count, int64_t padded, int64_t dim, real *columns) {
    for (int64_t i = 0; i < padded; i++)
        for (int64_t d = 0; d < dim; d++) columns[d * padded + i] = i < count ? rows[i * stride + d] : 0;
}

/* out[D][blocks · LANES] → rows of D, one per lane, times factor[lane]. */
static void store_lanes(const float *tile, int64_t dim, int blocks, int64_t count, const float *factor, real *rows,
                        int64_t stride) {
    for (int b = 0; b < blocks; b++)
        for (int64_t d = 0; d < dim; d += LANES) {
            vfloat r[LANES];
            vfloat by = load(factor + b * LANES);
            UNROLL for (int i = 0; i < LANES; i++) r[i] = load(tile + ((d + i) * blocks + b) * LANES) * by;
            transpose(r);
            for (int i = 0; i < LANES && b * LANES + i < count; i++) store_real(rows + (b * LANES + i) * stride + d, r[i]);
        }
}

/* scores[C][blocks · LANES] = keys · queries, by groups of blocks. */
static void products(const real *weight, int64_t stride, int64_t inner, int64_t rows, const uint32_t *panel,
                     int64_t block_stride, int blocks, float *out[QUERY_BLOCKS]) {
    for (int b = 0; b < blocks; b += GROUP_BLOCKS) {
        int some = blocks - b < GROUP_BLOCKS ? blocks - b : GROUP_BLOCKS;
        Product p = {weight, stride, inner, panel + b * block_stride, block_stride};
        multiply_strided(&p, rows, some, out[b / GROUP_BLOCKS]);
    }
}

INLINE float *score_at(float *out[QUERY_BLOCKS], int blocks, int64_t key, int b) {
    int group = b / GROUP_BLOCKS, first = group * GROUP_BLOCKS;
    int some = blocks - first < GROUP_BLOCKS ? blocks - first : GROUP_BLOCKS;
    return out[group] + (key * some + b - first) * LANES;
}

INLINE vint lane_positions(int64_t first, int b) {
    return lane_numbers() + (int32_t)(first + b * LANES);
}

INLINE int64_t scores_scratch(int64_t length, int64_t dim, int64_t group) {
    int64_t padded = up_to(length, LANES);
    int64_t forward = padded * QUERIES * 2 + padded * dim + QUERIES * dim * 3;
    int64_t backward = 2 * padded * QUERIES + 2 * padded * group * QUERIES + 2 * padded * dim + 2 * padded * dim +
                       (2 + 2 * group) * QUERIES * dim + 4 * QUERIES * dim + padded * dim;
    return (forward > backward ? forward : backward) + 2048;
}

static void *cut(char **at, int64_t bytes) {
    char *here = *at;
    *at += up_to(bytes, 64);
    return here;
}

static void split_scores(float *scores, int64_t keys, float *out[QUERY_BLOCKS]) {
    for (int g = 0; g < QUERY_BLOCKS / GROUP_BLOCKS; g++) out[g] = scores + g * keys * GROUP_BLOCKS * LANES;
}

static void attend_forward(const Attention *a, int64_t start, int64_t length, int64_t head, char *scratch) {
    int64_t dim = a->dim, group = a->heads / a->kv_heads, width = a->heads * dim, key_stride = a->kv_heads * dim;
    int64_t padded = up_to(length, LANES);
    float *scores = cut(&scratch, padded * QUERIES * 4), *tile = cut(&scratch, dim * QUERIES * 4);
    real *columns = cut(&scratch, padded * dim * sizeof(real));
    uint32_t *panel = cut(&scratch, QUERIES * dim * 4), *weights = cut(&scratch, padded * QUERIES * 4);
    const real *k = a->k + start * key_stride + head * dim, *v = a->v + start * a->value_stride + head * dim;
    float scale = 1.0f / sqrtf((float)dim), *out[QUERY_BLOCKS], *values[QUERY_BLOCKS];
    pack_columns(v, a->value_stride, length, padded, dim, columns);
    for (int64_t first = 0; first < length; first += QUERIES)
        for (int64_t g = 0; g < group; g++) {
            int64_t count = length - first < QUERIES ? length - first : QUERIES, seen = first + count;
            int64_t even = up_to(seen, 2);
            int blocks = (int)(up_to(count, LANES) / LANES);
            int64_t offset = (start + first) * width + (head * group + g) * dim;
            pack_lanes(a->q + offset, width, count, dim, panel);
            split_scores(scores, padded, out), split_scores(tile, dim, values);
            products(k, key_stride, dim, seen, panel, dim / PAIR * LANES, blocks, out);
            float factor[QUERIES] __attribute__((aligned(64)));
            for (int b = 0; b < blocks; b++) {
                vint at = lane_positions(first, b);
                vfloat most = spread(-INFINITY), total = {0};
                for (int64_t c = 0; c < seen; c++) {
                    vfloat s = load(score_at(out, blocks, c, b)) * scale;
                    if (c > first + b * LANES) s = choose(at >= (int32_t)c, s, spread(-INFINITY));
                    store(score_at(out, blocks, c, b), s);
                    most = larger(most, s);
                }
                uint32_t *to = weights + b * (padded / PAIR) * LANES;
                for (int64_t c = 0; c < even; c += 2) {
                    vfloat p = exp_of(load(score_at(out, blocks, c, b)) - most);
                    vfloat next = c + 1 < seen ? exp_of(load(score_at(out, blocks, c + 1, b)) - most) : (vfloat){0};
                    total += p + next;
                    pack(to + c / PAIR * LANES, p, next);
                }
                store(factor + b * LANES, 1.0f / total);
                for (int i = 0; i < LANES && b * LANES + i < count; i++)
                    a->log_total[(start + first + b * LANES + i) * a->heads + head * group + g] = most[i] + logf(total[i]);
            }
            products(columns, padded, even, dim, weights, padded / PAIR * LANES, blocks, values);
            for (int b = 0; b < blocks; b += GROUP_BLOCKS) {
                int some = blocks - b < GROUP_BLOCKS ? blocks - b : GROUP_BLOCKS;
                store_lanes(values[b / GROUP_BLOCKS], dim, some, count - b * LANES, factor + b * LANES,
                            a->out + offset + b * LANES * width, width);
            }
        }
}

/* sums[rows][D] += weights · panel of features, weights `real` with `stride`, over `inner` queries. */
static void add_over_queries(const real *weights, int64_t stride, int64_t inner, int64_t rows, const uint32_t *panel,
                             int64_t dim, float *tile, float *sums) {
    int all = (int)(dim / LANES);
    for (int b = 0; b < all; b += GROUP_BLOCKS) {
        int some = all - b < GROUP_BLOCKS ? all - b : GROUP_BLOCKS;
        Product p = {weights, stride, inner, panel + b * (inner / PAIR) * LANES, inner / PAIR * LANES};
        multiply_strided(&p, rows, some, tile);
        for (int64_t r = 0; r < rows; r++)
            for (int j = 0; j < some; j++) {
                float *to = sums + r * dim + (b + j) * LANES;
                store(to, load(to) + load(tile + (r * some + j) * LANES));
            }
    }
}

static void attend_backward(const Attention *a, int64_t start, int64_t length, int64_t head, char *scratch) {
    int64_t dim = a->dim, group = a->heads / a->kv_heads, width = a->heads * dim, key_stride = a->kv_heads * dim;
    int64_t padded = up_to(length, LANES), inner = group * QUERIES;
    float *scores = cut(&scratch, padded * QUERIES * 4), *grads = cut(&scratch, padded * QUERIES * 4);
    real *p_rows = cut(&scratch, padded * inner * sizeof(real)), *s_rows = cut(&scratch, padded * inner * sizeof(real));
    float *sum_k = cut(&scratch, padded * dim * 4), *sum_v = cut(&scratch, padded * dim * 4);
    real *columns = cut(&scratch, padded * dim * sizeof(real));
    uint32_t *panel_q = cut(&scratch, QUERIES * dim * 4), *panel_o = cut(&scratch, QUERIES * dim * 4);
    uint32_t *features_q = cut(&scratch, inner * dim * 4), *features_o = cut(&scratch, inner * dim * 4);
    float *tile = cut(&scratch, (padded > QUERIES ? padded : QUERIES) * dim * 4);
    const real *k = a->k + start * key_stride + head * dim, *v = a->v + start * a->value_stride + head * dim;
    float scale = 1.0f / sqrtf((float)dim), *out[QUERY_BLOCKS], *gradients[QUERY_BLOCKS], *tiles[QUERY_BLOCKS];
    split_scores(scores, padded, out), split_scores(grads, padded, gradients), split_scores(tile, dim, tiles);
    memset(sum_k, 0, padded * dim * 4), memset(sum_v, 0, padded * dim * 4);
    pack_columns(k, key_stride, length, padded, dim, columns);
    for (int64_t first = 0; first < length; first += QUERIES) {
        int64_t count = length - first < QUERIES ? length - first : QUERIES, seen = first + count;
        int64_t even = up_to(seen, 2), lanes = up_to(count, LANES), joined = group * lanes;
        int blocks = (int)(lanes / LANES);
        uint32_t *weights = (uint32_t *)scores; /* the scores are spent when their gradients are packed */
        for (int64_t g = 0; g < group; g++) {
            int64_t offset = (start + first) * width + (head * group + g) * dim;
            pack_lanes(a->q + offset, width, count, dim, panel_q);
            pack_lanes(a->grad_out + offset, width, count, dim, panel_o);
            products(k, key_stride, dim, seen, panel_q, dim / PAIR * LANES, blocks, out);
            products(v, a->value_stride, dim, seen, panel_o, dim / PAIR * LANES, blocks, gradients);
            for (int b = 0; b < blocks; b++) {
                float log_total[LANES], delta[LANES];
                for (int i = 0; i < LANES; i++) {
                    int64_t t = b * LANES + i;
                    log_total[i] = INFINITY, delta[i] = 0.0f; /* lanes past the end weigh nothing */
                    if (t >= count) continue;
                    log_total[i] = a->log_total[(start + first + t) * a->heads + head * group + g];
                    vfloat sum = {0};
                    for (int64_t d = 0; d < dim; d += LANES)
                        sum = fused(load_real(a->grad_out + offset + t * width + d),
                                    load_real(a->out + offset + t * width + d), sum);
                    delta[i] = sum_of(sum);
                }
                vint at = lane_positions(first, b);
                vfloat total = load(log_total), through = load(delta);
                for (int64_t c = 0; c < seen; c++) {
                    vfloat p = exp_of(load(score_at(out, blocks, c, b)) * scale - total);
                    if (c > first + b * LANES) p = choose(at >= (int32_t)c, p, (vfloat){0});
                    vfloat s = p * (load(score_at(gradients, blocks, c, b)) - through);
                    store_real(p_rows + c * joined + g * lanes + b * LANES, p);
                    store_real(s_rows + c * joined + g * lanes + b * LANES, s);
                    store(score_at(gradients, blocks, c, b), s);
                }
            }
            for (int b = 0; b < blocks; b++)
                for (int64_t c = 0; c < even; c += 2)
                    pack(weights + (b * (padded / PAIR) + c / PAIR) * LANES, load(score_at(gradients, blocks, c, b)),
                         c + 1 < seen ? load(score_at(gradients, blocks, c + 1, b)) : (vfloat){0});
            products(columns, padded, even, dim, weights, padded / PAIR * LANES, blocks, tiles);
            float factor[QUERIES] __attribute__((aligned(64)));
            for (int i = 0; i < QUERIES; i++) factor[i] = scale;
            for (int b = 0; b < blocks; b += GROUP_BLOCKS) {
                int some = blocks - b < GROUP_BLOCKS ? blocks - b : GROUP_BLOCKS;
                store_lanes(tiles[b / GROUP_BLOCKS], dim, some, count - b * LANES, factor,
                            a->grad_q + offset + b * LANES * width, width);
            }
            for (int64_t d = 0; d < dim; d += LANES) { /* this head's queries within the joined ones */
                uint32_t *to_q = features_q + (d / LANES * joined + g * lanes) / PAIR * LANES;
                uint32_t *to_o = features_o + (d / LANES * joined + g * lanes) / PAIR * LANES;
                pack_features(a->q + offset + d, width, count, lanes, LANES, to_q);
                pack_features(a->grad_out + offset + d, width, count, lanes, LANES, to_o);
            }
        }
        add_over_queries(p_rows, joined, joined, seen, features_o, dim, tile, sum_v);
        add_over_queries(s_rows, joined, joined, seen, features_q, dim, tile, sum_k);
    }
    for (int64_t t = 0; t < length; t++)
        for (int64_t d = 0; d < dim; d += LANES) {
            int64_t to = (start + t) * key_stride + head * dim + d;
            store_real(a->grad_k + to, load(sum_k + t * dim + d) * scale);
            store_real(a->grad_v + to, load(sum_v + t * dim + d));
        }
}
