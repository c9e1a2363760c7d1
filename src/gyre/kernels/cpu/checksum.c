/* Checksum: the multilinear sum of kernels/checksum.py, at the speed of memory. In: words of 1, 2 or 4 bytes of a run,
 * and where it lies. Out: the sum modulo 2^64. */
#include <stdint.h>

#define BLOCK 1024     /* words that one weight M covers */
#define PIECE (1 << 16) /* words that a thread takes at a time */

static uint64_t mix(uint64_t index) {
    uint64_t mixed = index * 0x9E3779B97F4A7C15u;
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9u;
    mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EBu;
    return (mixed ^ mixed >> 31) | 1;
}

typedef struct {
    uint32_t low[BLOCK], high[BLOCK]; /* halves of the weights T: a product of 32 bits is one vector instruction */
} Weights;

/* Within a block each half sums to less than 2^32 · 2^32 · 1024 modulo 2^64: wrapping is what we want. */
#define DEFINE_DOT(TYPE)                                                                                     \
    static uint64_t dot_##TYPE(const TYPE *word, const Weights *weights, int64_t first, int64_t count) {     \
        uint64_t low = 0, high = 0;                                                                          \
        for (int64_t i = 0; i < count; i++) {                                                                \
            low += (uint64_t)weights->low[first + i] * (uint32_t)word[i];                                    \
            high += (uint64_t)weights->high[first + i] * (uint32_t)word[i];                                  \
        }                                                                                                    \
        return low + (high << 32);                                                                           \
    }
DEFINE_DOT(uint8_t)
DEFINE_DOT(uint16_t)
DEFINE_DOT(uint32_t)

/* `count` words that lie together in the whole tensor, from its word `at` on. */
static uint64_t sum_span(const char *words, int64_t word_bytes, int64_t at, int64_t count, const Weights *weights) {
    uint64_t total = 0;
    while (count) {
        int64_t first = at % BLOCK, taken = BLOCK - first < count ? BLOCK - first : count;
        uint64_t dot = word_bytes == 2   ? dot_uint16_t((const uint16_t *)words, weights, first, taken)
                       : word_bytes == 4 ? dot_uint32_t((const uint32_t *)words, weights, first, taken)
                                         : dot_uint8_t((const uint8_t *)words, weights, first, taken);
        total += mix((uint64_t)(at / BLOCK)) * dot;
        words += taken * word_bytes, at += taken, count -= taken;
    }
    return total;
}

/* The run is words [start, start + count) of `width` columns, from `left` on, of a tensor of `columns`. */
uint64_t gyre_checksum(const char *words, int64_t word_bytes, int64_t count, int64_t start, int64_t left, int64_t width,
                       int64_t columns, const uint64_t *table, int64_t threads) {
    Weights weights;
    for (int64_t i = 0; i < BLOCK; i++) weights.low[i] = (uint32_t)table[i], weights.high[i] = (uint32_t)(table[i] >> 32);
    uint64_t total = 0;
#pragma omp parallel for num_threads(threads) reduction(+ : total) schedule(static) if (count > PIECE && threads > 1)
    for (int64_t piece = 0; piece < count; piece += PIECE) {
        int64_t end = piece + PIECE < count ? piece + PIECE : count;
        for (int64_t at = piece; at < end;) {
            int64_t row = (start + at) / width, column = (start + at) % width;
            int64_t taken = width - column < end - at ? width - column : end - at;
            total += sum_span(words + at * word_bytes, word_bytes, row * columns + left + column, taken, &weights);
            at += taken;
        }
    }
    return total;
}
