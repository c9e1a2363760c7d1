/* Causal attention of a few queries over the pages of one sequence, one kv head at a time, by chunks of 64 keys with a
 * running maximum. Chunks begin at key 0, so a query's result depends on nothing but its own sequence, however the
 * prompt was cut. All sums are float32. */
#pragma once
#include "lanes.h"

#define CHUNK_KEYS 64
#define ITEM_ROWS 32 /* query rows (queries × heads of the group) that share converted keys, at most */

typedef struct {
    const real *layer;      /* pool of the layer: [page][k or v][kv head][page token][D] */
    int64_t page_stride;    /* numbers from page to page */
    int64_t value_stride;   /* from keys to values of a page */
    int64_t head_stride;    /* from kv head to kv head */
    int64_t page_tokens;
    const int32_t *pages;   /* of the sequence */
} Keys;

INLINE const real *key_at(const Keys *keys, int64_t head, int64_t position) {
    return keys->layer + keys->pages[position / keys->page_tokens] * keys->page_stride + head * keys->head_stride +
           position % keys->page_tokens * (keys->head_stride / keys->page_tokens);
}

/* keys_D16[block][d][lane] and values[key][padded D] as float32, of `count` keys from `first` on. */
static void convert_keys(
    const Keys *keys, int64_t head, int64_t first, int count, int dim, float *keys_D16, float *values) {
    int padded = (dim + LANES - 1) / LANES * LANES;
    for (int base = 0; base < count; base += LANES) {
        float *out = keys_D16 + base * dim;
        const real *rows[LANES];
        for (int j = 0; j < LANES; j++) {
            int at = base + j < count ? base + j : count - 1; /* absent keys repeat the last one; they are masked */
            rows[j] = key_at(keys, head, first + at);
        }
        int d = 0;
        for (; d + LANES <= dim; d += LANES) {
            v16 r[LANES];
            UNROLL for (int j = 0; j < LANES; j++) r[j] = load_real(rows[j] + d);
            transpose(r);
            UNROLL for (int j = 0; j < LANES; j++) store(out + (d + j) * LANES, r[j]);
        }
        for (; d < dim; d++)
            for (int j = 0; j < LANES; j++) out[d * LANES + j] = widen(rows[j][d]);
        for (int j = 0; j < LANES && base + j < count; j++) {
            const real *from = rows[j] + keys->value_stride;
            float *to = values + (base + j) * padded;
            int e = 0;
            for (; e + LANES <= dim; e += LANES) store(to + e, load_real(from + e));
            for (; e < padded; e++) to[e] = e < dim ? widen(from[e]) : 0.0f;
        }
    }
}

/* One chunk of keys for `rows` query rows: updates maximum, sum and the weighted values of each. */
INLINE void attend_rows(
    int rows, int dim_blocks, int dim, const float *const query[], const int64_t limit[], float scale, int64_t first,
    int count, const float *keys_D16, const float *values, float *maximum, float *total, float *sum) {
    int padded = dim_blocks * LANES;
    float weight[4][CHUNK_KEYS];
    v16 score[4][CHUNK_KEYS / LANES];
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < CHUNK_KEYS / LANES; b++) score[r][b] = (v16){0};
    if (count > 2 * LANES) {
        for (int d = 0; d < dim; d++)
            UNROLL for (int b = 0; b < 4; b++) {
                v16 key = load(keys_D16 + (b * dim + d) * LANES);
                UNROLL for (int r = 0; r < rows; r++) score[r][b] += key * query[r][d];
            }
    } else {
        for (int d = 0; d < dim; d++)
            UNROLL for (int b = 0; b < 2; b++) {
                v16 key = load(keys_D16 + (b * dim + d) * LANES);
                UNROLL for (int r = 0; r < rows; r++) score[r][b] += key * query[r][d];
            }
    }
    const i16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    UNROLL for (int r = 0; r < rows; r++) {
        int seen = limit[r] + 1 - first < count ? (int)(limit[r] + 1 - first) : count;
        v16 most = spread(maximum[r]);
        UNROLL for (int b = 0; b < CHUNK_KEYS / LANES; b++) {
            score[r][b] = choose(lane + b * LANES < seen, score[r][b] * scale, spread(-INFINITY));
            most = larger(most, score[r][b]);
        }
        float new_maximum = max_of(most), kept = exp_of(spread(maximum[r] - new_maximum))[0];
        v16 added = {0};
        UNROLL for (int b = 0; b < CHUNK_KEYS / LANES; b++) {
            v16 w = exp_of(score[r][b] - new_maximum);
            store(weight[r] + b * LANES, w);
            added += w;
        }
        maximum[r] = new_maximum;
        total[r] = total[r] * kept + sum_of(added);
        for (int e = 0; e < padded; e += LANES) store(sum + r * padded + e, load(sum + r * padded + e) * kept);
    }
    for (int at = 0; at < dim_blocks; at += 4) { /* 64 features at a time: the accumulators stay in registers */
        int width = dim_blocks - at < 4 ? dim_blocks - at : 4;
        v16 acc[4][4];
        if (width == 4) {
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int b = 0; b < 4; b++) acc[r][b] = load(sum + r * padded + (at + b) * LANES);
            for (int j = 0; j < count; j++)
                UNROLL for (int b = 0; b < 4; b++) {
                    v16 value = load(values + j * padded + (at + b) * LANES);
                    UNROLL for (int r = 0; r < rows; r++) acc[r][b] += value * weight[r][j];
                }
            UNROLL for (int r = 0; r < rows; r++)
                UNROLL for (int b = 0; b < 4; b++) store(sum + r * padded + (at + b) * LANES, acc[r][b]);
            continue;
        }
        for (int b = at; b < at + width; b++) {
            UNROLL for (int r = 0; r < rows; r++) acc[r][0] = load(sum + r * padded + b * LANES);
            for (int j = 0; j < count; j++) {
                v16 value = load(values + j * padded + b * LANES);
                UNROLL for (int r = 0; r < rows; r++) acc[r][0] += value * weight[r][j];
            }
            UNROLL for (int r = 0; r < rows; r++) store(sum + r * padded + b * LANES, acc[r][0]);
        }
    }
}

/* Numbers of thread scratch that `attend` needs. */
INLINE int64_t attention_scratch(int64_t dim, int64_t rows) {
    int64_t padded = (dim + LANES - 1) / LANES * LANES;
    return CHUNK_KEYS * dim + CHUNK_KEYS * padded + rows * (padded + 32) + 64;
}

/* query[r]: D numbers; limit[r]: last position that row r sees; `sum` of [rows][padded D] gets the attended values. */
static float *attend(
    const Keys *keys, int64_t head, int dim, int rows, const float *const query[], const int64_t limit[],
    float *scratch) {
    int dim_blocks = (dim + LANES - 1) / LANES, padded = dim_blocks * LANES;
    float *keys_D16 = scratch, *values = keys_D16 + CHUNK_KEYS * dim, *sum = values + CHUNK_KEYS * padded;
    float *maximum = sum + rows * padded, *total = maximum + rows;
    int64_t last = 0;
    for (int r = 0; r < rows; r++) {
        maximum[r] = -INFINITY, total[r] = 0.0f;
        last = limit[r] > last ? limit[r] : last;
    }
    memset(sum, 0, sizeof(float) * rows * padded);
    float scale = 1.0f / sqrtf((float)dim);
    for (int64_t first = 0; first <= last; first += CHUNK_KEYS) {
        int count = last + 1 - first < CHUNK_KEYS ? (int)(last + 1 - first) : CHUNK_KEYS;
        convert_keys(keys, head, first, count, dim, keys_D16, values);
        int r = 0;
#define ROWS(n)                                                                                                       \
    for (; r + n <= rows; r += n) {                                                                                   \
        if (limit[r + n - 1] < first) continue; /* rows are in order of position */                                   \
        if (dim == 64)                                                                                                \
            attend_rows(n, 4, 64, query + r, limit + r, scale, first, count, keys_D16, values, maximum + r,           \
                        total + r, sum + r * padded);                                                                 \
        else                                                                                                          \
            attend_rows(n, dim_blocks, dim, query + r, limit + r, scale, first, count, keys_D16, values, maximum + r, \
                        total + r, sum + r * padded);                                                                 \
    }
        ROWS(4)
        ROWS(2)
        ROWS(1)
#undef ROWS
    }
    for (int r = 0; r < rows; r++)
        for (int e = 0; e < padded; e += LANES)
            store(sum + r * padded + e, load(sum + r * padded + e) / total[r]);
    return sum;
}
