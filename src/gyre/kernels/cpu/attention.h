/* Causal attention of a few queries over the pages of one sequence, one kv head at a time, by chunks of 64 keys with a
 * running maximum. Chunks begin at key 0, so a query's result depends on nothing but its own sequence, however the
 * prompt was cut. Sums and softmax weights are float32.
 *
 * Keys of a page lie transposed, [kv head][D / PAIR][page token], each place 32 bits wide: LANES keys are one vector
 * and need no turning. Values lie [kv head][page token][D]. */
#pragma once
#include "matmul.h"

#define CHUNK_KEYS 64
#define CHUNK_BLOCKS (CHUNK_KEYS / LANES)
#define ITEM_ROWS 32 /* query rows (queries × heads of the group) that share a chunk of keys, at most */
#define SPAN (LANES * PAIR) /* numbers in one vector of values */
#define ROWS_AT_ONCE 4
#define HELD (REGISTERS / 8) /* vectors of sums that a row keeps in registers, of so many rows; a multiple of PAIR */

typedef struct {
    const real *layer;      /* pool of the layer: [page][k or v][kv head][…] */
    int64_t page_stride;    /* numbers from page to page */
    int64_t value_stride;   /* from keys to values of a page */
    int64_t page_tokens, dim;
    const int32_t *pages;   /* of the sequence */
} Keys;

/* Up to 64 keys: where each block of LANES lies. */
typedef struct {
    const uint32_t *keys[CHUNK_BLOCKS]; /* [D / PAIR][key_stride] */
    const real *values[CHUNK_BLOCKS];   /* [LANES][dim_padded] */
    int64_t key_stride, dim_padded;
} Chunk;

INLINE int64_t padded_dim(int64_t dim) { return (dim + SPAN - 1) / SPAN * SPAN; }

INLINE const real *plane_of(const Keys *k, int64_t head, int64_t position) {
    return k->layer + k->pages[position / k->page_tokens] * k->page_stride + head * k->page_tokens * k->dim;
}

/* Find the blocks of keys [first, first + count), or copy them to `scratch` where pages or heads have odd sizes. */
static Chunk find_chunk(const Keys *k, int64_t head, int64_t first, int count, uint32_t *scratch) {
    int64_t steps = k->dim / PAIR, padded = padded_dim(k->dim);
    Chunk chunk = {.key_stride = k->page_tokens, .dim_padded = padded};
    int straight = k->page_tokens % LANES == 0 && padded == k->dim;
    if (!straight) chunk.key_stride = LANES;
    for (int b = 0; b * LANES < count; b++) {
        if (straight) {
            int64_t slot = (first + b * LANES) % k->page_tokens;
            const real *plane = plane_of(k, head, first + b * LANES);
            chunk.keys[b] = (const uint32_t *)plane + slot;
            chunk.values[b] = plane + k->value_stride + slot * k->dim;
            continue;
        }
        uint32_t *keys = scratch + b * LANES * (steps + padded / PAIR);
        real *values = (real *)(keys + steps * LANES);
        memset(keys, 0, LANES * (steps + padded / PAIR) * 4);
        for (int j = 0; j < LANES && b * LANES + j < count; j++) {
            int64_t position = first + b * LANES + j, slot = position % k->page_tokens;
            const real *plane = plane_of(k, head, position);
            for (int64_t d = 0; d < steps; d++)
                keys[d * LANES + j] = ((const uint32_t *)plane)[d * k->page_tokens + slot];
            memcpy(values + j * padded, plane + k->value_stride + slot * k->dim, sizeof(real) * k->dim);
        }
        chunk.keys[b] = keys, chunk.values[b] = values;
    }
    return chunk;
}

/* Ask for the memory of a chunk ahead of its use. */
static void prefetch_chunk(const Keys *k, int64_t head, int64_t first, int64_t count) {
    if (k->page_tokens % LANES) return;
    int64_t line = 64 / (int64_t)sizeof(real), step = k->page_tokens < count ? k->page_tokens : count;
    for (int64_t at = first; at < first + count; at += step) {
        const real *plane = plane_of(k, head, at);
        for (int64_t i = 0; i < step * k->dim; i += line) {
            __builtin_prefetch(plane + i);
            __builtin_prefetch(plane + k->value_stride + i);
        }
    }
}

/* Scores of the chunk's blocks [first, first + blocks). */
INLINE void score_rows(
    int rows, int first, int blocks, const Chunk *chunk, int64_t steps, const uint32_t *const query[],
    vfloat score[ROWS_AT_ONCE][CHUNK_BLOCKS]) {
    vfloat acc[ROWS_AT_ONCE][HELD];
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int b = 0; b < blocks; b++) acc[r][b] = (vfloat){0};
    for (int64_t d = 0; d < steps; d++)
        UNROLL for (int part = 0; part < PARTS_OF_STEP; part++)
            UNROLL for (int b = 0; b < blocks; b++) {
                vfloat key = part_of(part, load_bits(chunk->keys[first + b] + d * chunk->key_stride));
                UNROLL for (int r = 0; r < rows; r++)
                    acc[r][b] = multiply_add(acc[r][b], key, part_of(part, spread_bits(query[r][d])));
            }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int b = 0; b < blocks; b++) score[r][first + b] = acc[r][b];
}

/* acc += weight · value for one key: even and odd features apart where a lane holds two. */
INLINE void add_value(int rows, int vectors, const real *value, float *const weight[], int key,
                      vfloat acc[ROWS_AT_ONCE][HELD]) {
    UNROLL for (int u = 0; u < vectors; u++) {
        vuint bits = load_bits(value + u * SPAN);
#if GYRE_BF16
        vfloat even = (vfloat)(bits << 16), odd = (vfloat)(bits & 0xffff0000u);
        UNROLL for (int r = 0; r < rows; r++) {
            acc[r][2 * u] = fused(even, spread(weight[r][key]), acc[r][2 * u]);
            acc[r][2 * u + 1] = fused(odd, spread(weight[r][key]), acc[r][2 * u + 1]);
        }
#else
        UNROLL for (int r = 0; r < rows; r++) acc[r][u] = fused((vfloat)bits, spread(weight[r][key]), acc[r][u]);
#endif
    }
}

INLINE void add_values(int rows, int vectors, const Chunk *chunk, int count, int64_t at, float *const weight[],
                       float *const sum[]) {
    vfloat acc[ROWS_AT_ONCE][HELD];
    int held = vectors * PAIR;
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < held; i++) acc[r][i] = load(sum[r] + at + i * LANES);
    for (int b = 0; b * LANES < count; b++) {
        const real *value = chunk->values[b] + at;
        int keys = count - b * LANES < LANES ? count - b * LANES : LANES;
        for (int j = 0; j < keys; j++) add_value(rows, vectors, value + j * chunk->dim_padded, weight, b * LANES + j, acc);
    }
    UNROLL for (int r = 0; r < rows; r++)
        UNROLL for (int i = 0; i < held; i++) store(sum[r] + at + i * LANES, acc[r][i]);
}

/* One chunk of keys for `rows` query rows: updates maximum, total and weighted sum of each. */
INLINE void attend_rows(
    int rows, const Chunk *chunk, int64_t steps, const uint32_t *const query[], const int64_t limit[], float scale,
    int64_t first, int count, float *maximum, float *total, float *sums) {
    float weights[ROWS_AT_ONCE][CHUNK_KEYS], *weight[ROWS_AT_ONCE], *sum[ROWS_AT_ONCE];
    vfloat score[ROWS_AT_ONCE][CHUNK_BLOCKS];
    int blocks = (count + LANES - 1) / LANES;
    for (int b = 0; b < blocks; b += HELD)
        switch (blocks - b) {
        case 1: score_rows(rows, b, 1, chunk, steps, query, score); break;
#if HELD > 2
        case 2: score_rows(rows, b, 2, chunk, steps, query, score); break;
        case 3: score_rows(rows, b, 3, chunk, steps, query, score); break;
#endif
        default: score_rows(rows, b, HELD, chunk, steps, query, score);
        }
    const vint lane = lane_numbers();
    UNROLL for (int r = 0; r < rows; r++) {
        weight[r] = weights[r], sum[r] = sums + r * chunk->dim_padded;
        int seen = limit[r] + 1 - first < count ? (int)(limit[r] + 1 - first) : count;
        vfloat most = spread(maximum[r]), added = {0};
        for (int b = 0; b < blocks; b++) {
            score[r][b] = choose(lane + b * LANES < seen, score[r][b] * scale, spread(-INFINITY));
            most = larger(most, score[r][b]);
        }
        float new_maximum = max_of(most);
        for (int b = 0; b < blocks; b++) {
            vfloat w = exp_of(score[r][b] - new_maximum);
            store(weight[r] + b * LANES, w);
            added += w;
        }
        if (new_maximum > maximum[r]) {
            float kept = exp_of(spread(maximum[r] - new_maximum))[0];
            total[r] *= kept;
            for (int64_t e = 0; e < chunk->dim_padded; e += LANES) store(sum[r] + e, load(sum[r] + e) * kept);
        }
        maximum[r] = new_maximum;
        total[r] += sum_of(added);
    }
    int64_t at = 0;
    for (; at + HELD * LANES <= chunk->dim_padded; at += HELD * LANES)
        add_values(rows, HELD / PAIR, chunk, count, at, weight, sum);
    for (; at < chunk->dim_padded; at += SPAN) add_values(rows, 1, chunk, count, at, weight, sum);
}

/* Floats of thread scratch that `attend` needs. */
INLINE int64_t attention_scratch(int64_t dim, int64_t rows) {
    return CHUNK_KEYS * (dim + padded_dim(dim)) + rows * (padded_dim(dim) + 2) + 64;
}

/* query[r]: D numbers as they lie in lanes; limit[r]: last position that row r sees, rising with r. Returns [rows]
 * [padded D] sums: features as lanes hold them, all first halves of SPAN numbers before their second. */
static float *attend(
    const Keys *keys, int64_t head, int rows, const uint32_t *const query[], const int64_t limit[], float *scratch) {
    int64_t padded = padded_dim(keys->dim), last = limit[rows - 1], steps = keys->dim / PAIR;
    float *sum = scratch, *maximum = sum + rows * padded, *total = maximum + rows;
    uint32_t *copies = (uint32_t *)(scratch + (rows * (padded + 2) + 15) / 16 * 16);
    for (int r = 0; r < rows; r++) maximum[r] = -INFINITY, total[r] = 0.0f;
    memset(sum, 0, sizeof(float) * rows * padded);
    float scale = 1.0f / sqrtf((float)keys->dim);
    for (int64_t first = 0; first <= last; first += CHUNK_KEYS) {
        int64_t left = last + 1 - first;
        int count = left < CHUNK_KEYS ? (int)left : CHUNK_KEYS;
        if (left > CHUNK_KEYS)
            prefetch_chunk(keys, head, first + CHUNK_KEYS, left < 2 * CHUNK_KEYS ? left - CHUNK_KEYS : CHUNK_KEYS);
        Chunk chunk = find_chunk(keys, head, first, count, copies);
        int r = 0;
#define ROWS(n)                                                                                                       \
    for (; r + n <= rows; r += n)                                                                                     \
        if (limit[r + n - 1] >= first)                                                                                \
            attend_rows(n, &chunk, steps, query + r, limit + r, scale, first, count, maximum + r, total + r,          \
                        sum + r * padded);
        ROWS(4)
        ROWS(2)
        ROWS(1)
#undef ROWS
    }
    for (int r = 0; r < rows; r++)
        for (int64_t e = 0; e < padded; e += LANES)
            store(sum + r * padded + e, load(sum + r * padded + e) / total[r]);
    return sum;
}
