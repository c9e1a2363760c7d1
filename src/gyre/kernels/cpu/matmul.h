/* Matrix products with tokens in lanes: out[n][token] = Σ_k weight[n][k] · panel[k][token].
 * Weights are read where they lie, row by row, one number (or bfloat16 pair) spread over the lanes; LANES tokens are
 * one vector. So a weight is never repacked, and the sum of one token runs over k in one order, whatever tokens share
 * its step: the result of a token does not depend on the batch.
 * A panel holds blocks of LANES tokens: [block][k / PAIR][lane], each lane 32 bits wide. */
#pragma once
#include "lanes.h"

#define GROUP_BLOCKS 4 /* token blocks multiplied at once; the sums of a tile fill the registers */
#define MOST_ROWS 12 /* of a tile */
/* Registers that hold sums. The rest hold factors, of which parts need more. */
#define ACCUMULATORS (REGISTERS == 16 && PARTS_OF_STEP == 2 ? 8 : REGISTERS * 3 / 4)
#define PANEL_STEPS 512 /* panel lines (steps × blocks) that stay in the first cache while all rows pass: 32 KiB at most */
#define LINE (64 / (int64_t)sizeof(real)) /* numbers in a cache line */
#define CHUNK_ROWS 48 /* weight rows between two epilogues; a multiple of all tile heights and of LANES */

INLINE uint32_t weight_bits(const real *at) {
    uint32_t bits;
    memcpy(&bits, at, sizeof bits);
    return bits;
}

/* One product: `rows` rows of weights, `stride` apart, of `inner` numbers; a panel of blocks `block_stride` apart. */
typedef struct {
    const real *weight;
    int64_t stride, inner;
    const uint32_t *panel;
    int64_t block_stride;
} Product;

/* Steps [begin, end) of the sums; those before it lie in `out` already. */
INLINE void tile(int rows, int blocks, const Product *p, int64_t row, int64_t begin, int64_t end, float *out) {
    const real *weight = p->weight + row * p->stride;
    vfloat acc[MOST_ROWS][GROUP_BLOCKS];
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < blocks; j++)
            acc[i][j] = begin ? load(out + ((row + i) * blocks + j) * LANES) : (vfloat){0};
    for (int64_t k = begin; k < end; k++) {
        if (k % (LINE / PAIR) == 0) /* the next tile's rows: too short for the processor to foresee them */
            UNROLL for (int i = 0; i < rows; i++) __builtin_prefetch(weight + (rows + i) * p->stride + k * PAIR);
        UNROLL for (int part = 0; part < PARTS_OF_STEP; part++) {
            if (blocks > rows) { /* the fewer factors are held while the others pass */
                vfloat w[MOST_ROWS];
                UNROLL for (int i = 0; i < rows; i++)
                    w[i] = part_of(part, spread_bits(weight_bits(weight + i * p->stride + k * PAIR)));
                UNROLL for (int j = 0; j < blocks; j++) {
                    vfloat x = part_of(part, *(const vuint *)(p->panel + j * p->block_stride + k * LANES));
                    UNROLL for (int i = 0; i < rows; i++) acc[i][j] = multiply_add(acc[i][j], x, w[i]);
                }
            } else {
                vfloat x[GROUP_BLOCKS];
                UNROLL for (int j = 0; j < blocks; j++)
                    x[j] = part_of(part, *(const vuint *)(p->panel + j * p->block_stride + k * LANES));
                UNROLL for (int i = 0; i < rows; i++) {
                    vfloat w = part_of(part, spread_bits(weight_bits(weight + i * p->stride + k * PAIR)));
                    UNROLL for (int j = 0; j < blocks; j++) acc[i][j] = multiply_add(acc[i][j], x[j], w);
                }
            }
        }
    }
    UNROLL for (int i = 0; i < rows; i++)
        UNROLL for (int j = 0; j < blocks; j++) store(out + ((row + i) * blocks + j) * LANES, acc[i][j]);
}

INLINE void multiply_blocks(int blocks, const Product *p, int64_t rows, float *out) {
    const int tile_rows = ACCUMULATORS / blocks < MOST_ROWS ? ACCUMULATORS / blocks : MOST_ROWS;
    int64_t steps = p->inner / PAIR, most = PANEL_STEPS / blocks;
    for (int64_t begin = 0; begin < steps; begin += most) {
        int64_t end = begin + most < steps ? begin + most : steps, n = 0;
        for (; n + tile_rows <= rows; n += tile_rows) tile(tile_rows, blocks, p, n, begin, end, out);
        if (tile_rows > 4)
            for (; n + 4 <= rows; n += 4) tile(4, blocks, p, n, begin, end, out);
        for (; n < rows; n++) tile(1, blocks, p, n, begin, end, out);
    }
}

/* out[rows][blocks · LANES] for one group of token blocks. */
static void multiply_strided(const Product *p, int64_t rows, int blocks, float *out) {
    switch (blocks) {
    case 1: multiply_blocks(1, p, rows, out); break;
    case 2: multiply_blocks(2, p, rows, out); break;
    case 3: multiply_blocks(3, p, rows, out); break;
    case 4: multiply_blocks(4, p, rows, out); break;
    }
}

INLINE void multiply(
    const real *weight, int64_t inner, int64_t rows, const uint32_t *panel, int blocks, float *out) {
    Product p = {weight, inner, inner, panel, inner / PAIR * LANES};
    multiply_strided(&p, rows, blocks, out);
}

/* Pack two rows of lanes (features k and k + 1), rounded, into the lanes at `at`; into two rows, `stride` apart, where
 * a lane holds one number. */
INLINE void pack_rows(uint32_t *at, int64_t stride, vfloat first, vfloat second) {
#if GYRE_BF16
    *(vuint_any *)at = (rounded_bits(first) >> 16) | rounded_bits(second);
#else
    *(vfloat_any *)at = first;
    *(vfloat_any *)(at + stride) = second;
#endif
}

INLINE void pack(uint32_t *at, vfloat first, vfloat second) { pack_rows(at, LANES, first, second); }
