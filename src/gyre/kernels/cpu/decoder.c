/* One step of the engine: embedding, all layers over paged KV, logits, choice. In: the model's weights where they lie,
 * the sequences' rows, the pool. Out: KV in the pages, logits, chosen tokens. Caller: engine.cpu_step, through ctypes.
 *
 * Tokens lie in lanes: activations are [block of LANES tokens][feature][lane]. Norms, rotary turning, SiLU are sums and
 * products of whole vectors then; attention alone works token by token. One team of threads goes through the whole
 * step with barriers between its stages. Each matrix is cut by its rows (features out), so that a weight is read by one
 * thread only. Activations are float32, rounded to `real` where torch's bfloat16 path rounds them.
 *
 * T tokens of the step, N rows that choose, E hidden, H heads, K kv heads, D head dim, A = H·D, M mlp, V vocabulary. */
#include "attention.h"
#include "matmul.h"
#include "sample.h"
#include "team.h"
#if defined(_OPENMP)
#include <omp.h>
#endif

enum { ATTN_NORM, QKV, QKV_BIAS, Q_NORM, K_NORM, OUT, MLP_NORM, GATE_UP, DOWN, PARTS };

typedef struct {
    int64_t layers, hidden, heads, kv_heads, head_dim, mlp, vocab;
    double norm_eps;
    const real *embed, *final_norm, *head;
    const real *const *weights;      /* [layers][PARTS], null where the family has none */
    const float *cosines, *sines;    /* [position][D / 2] */
} Model;

typedef struct {
    int64_t sequences, tokens, samples, threads;
    int64_t projected;               /* of the samples, the first so many get logits; the others their residual stream */
    const int64_t *row_S, *start_S, *count_S; /* its row, first position and number of tokens in this step */
    const int32_t *tokens_RW, *table_RP;
    int64_t width, pages_width;
    const int64_t *source_N;         /* the token whose hidden state each sampling row continues */
    real *pool;                      /* [layer][page][k, v][K][…], see attention.h */
    int64_t layer_stride, page_stride, page_tokens;
    float *logits_NV;
    float *residual_NE;              /* of the samples past the projected ones */
    int64_t chooses;                 /* 0: logits only */
    const float *inverse_N;          /* 1 / temperature; 0 for greedy rows */
    const double *uniform_N;
    int32_t *token_N;
    float *logprob_N, *raw_N;
    char *scratch;
} Step;

#define TASKS 4 /* attention tasks taken at a time */

typedef struct {
    int64_t first, count, sequence;  /* token, number of queries */
} Item;

typedef struct {
    float *x;                        /* residual stream [block][E][lane] */
    float *cosines, *sines;          /* [block][D / 2][lane] */
    uint32_t *query;                 /* [T][A / PAIR] */
    uint32_t *normed, *attended, *product; /* panels */
    float *kept_x;                   /* of sampling rows only, after the last attention */
    uint32_t *kept_attended;
    int64_t *row, *position;         /* [T] */
    Item *items;
    int64_t num_items;
    float *threads;
    int64_t thread_floats;
    Team *team;
} Work;

INLINE int64_t blocks_of(int64_t tokens) { return (tokens + LANES - 1) / LANES; }

static void *carve(char **at, int64_t bytes) {
    char *here = *at;
    *at += (bytes + 63) / 64 * 64;
    return here;
}

static int64_t item_queries(const Model *m) {
    int64_t group = m->heads / m->kv_heads;
    return group >= ITEM_ROWS ? 1 : ITEM_ROWS / group;
}

/* Lay the work area out from `base` on; returns its end. */
static char *lay_out(const Model *m, int64_t tokens, int64_t sequences, int64_t samples, int64_t threads, char *base,
                     Work *w) {
    int64_t blocks = blocks_of(tokens), kept = blocks_of(samples), lane = LANES * 4, group = m->heads / m->kv_heads;
    int64_t attended = m->heads * m->head_dim / PAIR * lane, rows = item_queries(m) * group;
    int64_t tile = CHUNK_ROWS * GROUP_BLOCKS * LANES, head = m->head_dim * GROUP_BLOCKS * LANES;
    int64_t sums = 2 * (m->vocab / SUM_TOKENS + 1), most = attention_scratch(m->head_dim, rows);
    most = 2 * tile > most ? 2 * tile : most;
    most = head > most ? head : most;
    most = sums > most ? sums : most;
    w->thread_floats = (most + 31) / 16 * 16;
    w->x = carve(&base, blocks * m->hidden * lane);
    w->cosines = carve(&base, blocks * m->head_dim / 2 * lane);
    w->sines = carve(&base, blocks * m->head_dim / 2 * lane);
    w->query = carve(&base, tokens * m->heads * m->head_dim / PAIR * 4);
    w->normed = carve(&base, (blocks > kept ? blocks : kept) * m->hidden / PAIR * lane);
    w->attended = carve(&base, blocks * attended);
    w->product = carve(&base, (blocks > kept ? blocks : kept) * m->mlp / PAIR * lane);
    w->kept_x = carve(&base, kept * m->hidden * lane);
    w->kept_attended = carve(&base, kept * attended);
    w->row = carve(&base, tokens * 8);
    w->position = carve(&base, tokens * 8);
    w->items = carve(&base, (tokens / item_queries(m) + sequences + 1) * (int64_t)sizeof(Item));
    w->threads = carve(&base, threads * w->thread_floats * 4);
    return base;
}

int64_t gyre_scratch_bytes(const Model *m, int64_t tokens, int64_t sequences, int64_t samples, int64_t threads) {
    Work w;
    return lay_out(m, tokens, sequences, samples, threads, 0, &w) - (char *)0;
}

static void list_tokens(const Model *m, const Step *s, Work *w) {
    int64_t most = item_queries(m), t = 0;
    w->num_items = 0;
    for (int64_t q = 0; q < s->sequences; q++) {
        for (int64_t i = 0; i < s->count_S[q]; i += most) {
            int64_t left = s->count_S[q] - i;
            w->items[w->num_items++] = (Item){t + i, left < most ? left : most, q};
        }
        for (int64_t i = 0; i < s->count_S[q]; i++, t++) w->row[t] = s->row_S[q], w->position[t] = s->start_S[q] + i;
    }
}

/* This thread's part of `count` things. */
INLINE void share(int64_t count, int64_t thread, int64_t threads, int64_t *begin, int64_t *end) {
    *begin = count * thread / threads;
    *end = count * (thread + 1) / threads;
}

static void embed(const Model *m, const Step *s, const Work *w, int64_t block) {
    float *x = w->x + block * m->hidden * LANES;
    int64_t half = m->head_dim / 2;
    float *cosines = w->cosines + block * half * LANES, *sines = w->sines + block * half * LANES;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t t = block * LANES + lane;
        int64_t known = t < s->tokens ? t : s->tokens - 1; /* lanes past the end repeat the last token */
        const real *from = m->embed + (int64_t)s->tokens_RW[w->row[known] * s->width + w->position[known]] * m->hidden;
        for (int64_t e = 0; e < m->hidden; e++) x[e * LANES + lane] = widen(from[e]);
        const float *c = m->cosines + w->position[known] * half, *n = m->sines + w->position[known] * half;
        for (int64_t f = 0; f < half; f++) cosines[f * LANES + lane] = c[f], sines[f * LANES + lane] = n[f];
    }
}

INLINE vfloat root_scale(vfloat squares, int64_t features, double eps) {
    vfloat mean = squares * (1.0f / (float)features) + (float)eps;
    return 1.0f / root_of(mean);
}

static void norm_block(const float *x, const real *weight, int64_t hidden, double eps, uint32_t *panel) {
    vfloat even = {0}, odd = {0};
    for (int64_t e = 0; e < hidden; e += 2) {
        vfloat a = load(x + e * LANES), b = load(x + (e + 1) * LANES);
        even = fused(a, a, even), odd = fused(b, b, odd);
    }
    vfloat scale = root_scale(even + odd, hidden, eps);
    for (int64_t e = 0; e < hidden; e += 2)
        pack(panel + e / PAIR * LANES, rounded(load(x + e * LANES) * scale) * widen(weight[e]),
             rounded(load(x + (e + 1) * LANES) * scale) * widen(weight[e + 1]));
}

/* Norm and rotary turning of one head of `blocks` token blocks, in place: tile[D][blocks · LANES]. */
static void finish_head(const Model *m, const Work *w, float *tile, int64_t first_block, int blocks,
                        const real *bias, const real *norm, int turns) {
    int64_t dim = m->head_dim, half = dim / 2, stride = blocks * LANES;
    for (int b = 0; b < blocks; b++) {
        float *x = tile + b * LANES;
        vfloat squares = {0}, scale = spread(1.0f);
        for (int64_t d = 0; d < dim; d++) {
            vfloat y = load(x + d * stride);
            y = rounded(bias ? y + widen(bias[d]) : y);
            squares = fused(y, y, squares);
            store(x + d * stride, y);
        }
        if (norm) {
            scale = root_scale(squares, dim, m->norm_eps);
            for (int64_t d = 0; d < dim; d++)
                store(x + d * stride, rounded(rounded(load(x + d * stride) * scale) * widen(norm[d])));
        }
        if (!turns) continue;
        const float *cosines = w->cosines + (first_block + b) * half * LANES;
        const float *sines = w->sines + (first_block + b) * half * LANES;
        for (int64_t f = 0; f < half; f++) {
            vfloat first = load(x + f * stride), second = load(x + (f + half) * stride);
            vfloat c = load(cosines + f * LANES), n = load(sines + f * LANES);
            store(x + f * stride, rounded(rounded(first * c) - second * n));
            store(x + (f + half) * stride, rounded(rounded(second * c) + first * n));
        }
    }
}

/* Store one block of a tile [features][stride] token by token: `at_token(lane)` gets its features in a row. */
#define BY_TOKEN(tile, features, stride, lanes, at_token)                                                             \
    do {                                                                                                              \
        int64_t d = 0;                                                                                                \
        for (; d + LANES <= (features); d += LANES) {                                                                 \
            vfloat r[LANES];                                                                                          \
            UNROLL for (int i = 0; i < LANES; i++) r[i] = load((tile) + (d + i) * (stride));                          \
            transpose(r);                                                                                             \
            for (int lane = 0; lane < (lanes); lane++) store((float *)(at_token(lane)) + d, r[lane]);                 \
        }                                                                                                             \
        for (; d < (features); d++)                                                                                   \
            for (int lane = 0; lane < (lanes); lane++) ((float *)(at_token(lane)))[d] = (tile)[d * (stride) + lane];  \
    } while (0)

/* q|k|v of head `unit` (of H + 2K) for one group of token blocks: queries to the work area, keys and values to pages. */
static void project_head(const Model *m, const Step *s, const Work *w, int64_t layer, int64_t unit, int64_t first_block,
                         int blocks, float *tile) {
    const real *const *part = m->weights + layer * PARTS;
    int64_t dim = m->head_dim, stride = blocks * LANES;
    int is_query = unit < m->heads, is_key = !is_query && unit < m->heads + m->kv_heads;
    multiply(part[QKV] + unit * dim * m->hidden, m->hidden, dim, w->normed + first_block * (m->hidden / PAIR) * LANES,
             blocks, tile);
    finish_head(m, w, tile, first_block, blocks, part[QKV_BIAS] ? part[QKV_BIAS] + unit * dim : 0,
                is_query ? part[Q_NORM] : is_key ? part[K_NORM] : 0, is_query || is_key);
    int64_t steps = dim / PAIR, plane = unit - m->heads; /* k heads, then v heads */
    for (int b = 0; b < blocks; b++) {
        int64_t first = (first_block + b) * LANES;
        int lanes = s->tokens - first < LANES ? (int)(s->tokens - first) : LANES;
        float *from = tile + b * LANES;
        for (int64_t d = 0; d < dim; d += 2) /* in place: pairs end where their first row or an earlier one was */
            pack_rows((uint32_t *)from + d / PAIR * stride, stride, load(from + d * stride), load(from + (d + 1) * stride));
        if (is_query) {
            uint32_t *to = w->query + (first * m->heads + unit) * steps;
#define QUERY(lane) (to + (lane) * m->heads * steps)
            BY_TOKEN(from, steps, stride, lanes, QUERY);
            continue;
        }
        real *to[LANES];
        for (int lane = 0; lane < lanes; lane++) {
            int64_t position = w->position[first + lane], slot = position % s->page_tokens;
            int64_t page = s->table_RP[w->row[first + lane] * s->pages_width + position / s->page_tokens];
            to[lane] = s->pool + layer * s->layer_stride + page * s->page_stride + plane * s->page_tokens * dim +
                       slot * (is_key ? PAIR : dim);
        }
#define SLOT(lane) to[lane]
        if (!is_key) BY_TOKEN(from, steps, stride, lanes, SLOT);
        if (is_key)
            for (int lane = 0; lane < lanes; lane++)
                for (int64_t d = 0; d < steps; d++)
                    ((uint32_t *)to[lane])[d * s->page_tokens] = ((uint32_t *)from)[d * stride + lane];
    }
}

INLINE Keys keys_of(const Model *m, const Step *s, int64_t layer, int64_t sequence) {
    return (Keys){
        .layer = s->pool + layer * s->layer_stride,
        .page_stride = s->page_stride,
        .value_stride = m->kv_heads * s->page_tokens * m->head_dim,
        .page_tokens = s->page_tokens,
        .dim = m->head_dim,
        .pages = s->table_RP + s->row_S[sequence] * s->pages_width,
    };
}

static void attend_item(const Model *m, const Step *s, const Work *w, int64_t layer, int64_t task, float *scratch) {
    const Item *item = w->items + task / m->kv_heads, *next = w->items + (task + 1) / m->kv_heads;
    int64_t head = task % m->kv_heads, dim = m->head_dim, steps = dim / PAIR, group = m->heads / m->kv_heads;
    if (next < w->items + w->num_items) {
        Keys ahead = keys_of(m, s, layer, next->sequence);
        int64_t known = w->position[next->first] + 1;
        prefetch_chunk(&ahead, (task + 1) % m->kv_heads, 0, known < CHUNK_KEYS ? known : CHUNK_KEYS);
    }
    Keys keys = keys_of(m, s, layer, item->sequence);
    int rows = (int)(item->count * group);
    const uint32_t *query[rows];
    int64_t limit[rows], padded = padded_dim(dim);
    for (int r = 0; r < rows; r++) {
        int64_t t = item->first + r / group;
        query[r] = w->query + (t * m->heads + head * group + r % group) * steps;
        limit[r] = w->position[t];
    }
    const float *values = attend(&keys, head, rows, query, limit, scratch);
    for (int r = 0; r < rows; r++) {
        int64_t t = item->first + r / group, feature = (head * group + r % group) * steps;
        uint32_t *to = w->attended + (t / LANES * (m->heads * steps) + feature) * LANES + t % LANES;
        const float *from = values + r * padded;
        for (int64_t d = 0; d < steps; d += LANES) {
            uint32_t bits[LANES * 2] __attribute__((aligned(64)));
            pack(bits, load(from + d * PAIR), load(from + d * PAIR + (PAIR - 1) * LANES));
            for (int64_t i = 0; i < LANES && d + i < steps; i++) to[(d + i) * LANES] = bits[i];
        }
    }
}

/* x += weight · panel for output features [begin, end). */
static void add_product(const real *weight, int64_t inner, int64_t begin, int64_t end, const uint32_t *panel,
                        int64_t tokens, int64_t hidden, float *x, float *tile) {
    int64_t num_blocks = blocks_of(tokens);
    for (int64_t first = 0; first < num_blocks; first += GROUP_BLOCKS) {
        int blocks = num_blocks - first < GROUP_BLOCKS ? (int)(num_blocks - first) : GROUP_BLOCKS;
        for (int64_t n = begin; n < end; n += CHUNK_ROWS) {
            int64_t rows = end - n < CHUNK_ROWS ? end - n : CHUNK_ROWS;
            multiply(weight + n * inner, inner, rows, panel + first * (inner / PAIR) * LANES, blocks, tile);
            for (int64_t i = 0; i < rows; i++)
                for (int b = 0; b < blocks; b++) {
                    float *at = x + ((first + b) * hidden + n + i) * LANES;
                    store(at, rounded(load(at) + load(tile + (i * blocks + b) * LANES)));
                }
        }
    }
}

/* silu(gate) · up into the product panel, for mlp features [begin, end), both even. */
static void gate_product(const Model *m, const real *weight, int64_t begin, int64_t end, const uint32_t *panel,
                         int64_t tokens, uint32_t *product, float *tile) {
    int64_t num_blocks = blocks_of(tokens), inner = m->hidden;
    float *up_tile = tile + CHUNK_ROWS * GROUP_BLOCKS * LANES;
    for (int64_t first = 0; first < num_blocks; first += GROUP_BLOCKS) {
        int blocks = num_blocks - first < GROUP_BLOCKS ? (int)(num_blocks - first) : GROUP_BLOCKS;
        const uint32_t *from = panel + first * (inner / PAIR) * LANES;
        for (int64_t n = begin; n < end; n += CHUNK_ROWS) {
            int64_t rows = end - n < CHUNK_ROWS ? end - n : CHUNK_ROWS;
            multiply(weight + n * inner, inner, rows, from, blocks, tile);
            multiply(weight + (m->mlp + n) * inner, inner, rows, from, blocks, up_tile);
            for (int64_t i = 0; i < rows; i += 2)
                for (int b = 0; b < blocks; b++) {
                    vfloat y[2];
                    UNROLL for (int j = 0; j < 2; j++) {
                        vfloat gate = rounded(load(tile + ((i + j) * blocks + b) * LANES));
                        vfloat up = rounded(load(up_tile + ((i + j) * blocks + b) * LANES));
                        y[j] = rounded(gate / (1.0f + exp_of(-gate))) * up;
                    }
                    pack(product + ((first + b) * (m->mlp / PAIR) + (n + i) / PAIR) * LANES, y[0], y[1]);
                }
        }
    }
}

static void project_vocabulary(const Model *m, const Step *s, const Work *w, int64_t begin, int64_t end, float *tile) {
    int64_t num_blocks = blocks_of(s->projected);
    for (int64_t first = 0; first < num_blocks; first += GROUP_BLOCKS) {
        int blocks = num_blocks - first < GROUP_BLOCKS ? (int)(num_blocks - first) : GROUP_BLOCKS;
        for (int64_t v = begin; v < end; v += CHUNK_ROWS) {
            int64_t rows = end - v < CHUNK_ROWS ? end - v : CHUNK_ROWS, stride = blocks * LANES;
            multiply(m->head + v * m->hidden, m->hidden, rows, w->normed + first * (m->hidden / PAIR) * LANES, blocks,
                     tile);
            for (int64_t i = 0; i < rows * blocks; i++) store(tile + i * LANES, rounded(load(tile + i * LANES)));
            for (int b = 0; b < blocks; b++) {
                int64_t row = (first + b) * LANES;
                int lanes = s->projected - row < LANES ? (int)(s->projected - row) : LANES;
                float *to = s->logits_NV + row * m->vocab + v;
#define LOGITS(lane) (to + (lane) * m->vocab)
                BY_TOKEN(tile + b * LANES, rows, stride, lanes, LOGITS);
            }
        }
    }
}

/* Copy the sampling rows' lanes of residual stream and attended values to blocks of their own. */
static void keep_block(const Model *m, const Step *s, const Work *w, int64_t block) {
    int64_t attended = m->heads * m->head_dim / PAIR;
    for (int lane = 0; lane < LANES; lane++) {
        int64_t n = block * LANES + lane, t = s->source_N[n < s->samples ? n : s->samples - 1];
        const float *x = w->x + t / LANES * m->hidden * LANES + t % LANES;
        const uint32_t *a = w->attended + t / LANES * attended * LANES + t % LANES;
        float *to = w->kept_x + block * m->hidden * LANES + lane;
        uint32_t *to_a = w->kept_attended + block * attended * LANES + lane;
        for (int64_t e = 0; e < m->hidden; e++) to[e * LANES] = x[e * LANES];
        for (int64_t e = 0; e < attended; e++) to_a[e * LANES] = a[e * LANES];
    }
}

#define BARRIER meet(w->team, threads);

static void norm_stage(const Model *m, const real *weight, const float *x, int64_t tokens, const Work *w,
                       int64_t thread, int64_t threads) {
    int64_t begin, end;
    share(blocks_of(tokens), thread, threads, &begin, &end);
    for (int64_t b = begin; b < end; b++)
        norm_block(x + b * m->hidden * LANES, weight, m->hidden, m->norm_eps,
                   w->normed + b * (m->hidden / PAIR) * LANES);
}

static void attention_stage(const Model *m, const Step *s, const Work *w, int64_t layer, int64_t thread,
                            int64_t threads, float *scratch) {
    int64_t num_blocks = blocks_of(s->tokens), groups = (num_blocks + GROUP_BLOCKS - 1) / GROUP_BLOCKS, begin, end;
    share((m->heads + 2 * m->kv_heads) * groups, thread, threads, &begin, &end);
    for (int64_t task = begin; task < end; task++) { /* a thread keeps its heads' weights over all groups */
        int64_t first = task % groups * GROUP_BLOCKS, left = num_blocks - first;
        project_head(m, s, w, layer, task / groups, first, left < GROUP_BLOCKS ? (int)left : GROUP_BLOCKS, scratch);
    }
    BARRIER
    int64_t tasks = w->num_items * m->kv_heads;
    int stage = (int)(layer & 1);
    clear_tasks(w->team, !stage); /* nobody is in the other layers' stages now */
    for (int64_t task; (task = take_tasks(w->team, stage, TASKS)) < tasks;)
        for (int64_t i = task; i < task + TASKS && i < tasks; i++) attend_item(m, s, w, layer, i, scratch);
    BARRIER
}

static void attention_output_stage(const Model *m, const real *const *part, float *x, const uint32_t *attended,
                                   int64_t tokens, int64_t thread, int64_t threads, float *scratch) {
    int64_t begin, end;
    share(m->hidden, thread, threads, &begin, &end);
    add_product(part[OUT], m->heads * m->head_dim, begin, end, attended, tokens, m->hidden, x, scratch);
}

static void mlp_stage(const Model *m, const real *const *part, float *x, int64_t tokens, const Work *w, int64_t thread,
                      int64_t threads, float *scratch) {
    int64_t begin, end, first, last;
    norm_stage(m, part[MLP_NORM], x, tokens, w, thread, threads);
    BARRIER
    share(m->mlp / 2, thread, threads, &first, &last);
    gate_product(m, part[GATE_UP], 2 * first, 2 * last, w->normed, tokens, w->product, scratch);
    BARRIER
    share(m->hidden, thread, threads, &begin, &end);
    add_product(part[DOWN], m->mlp, begin, end, w->product, tokens, m->hidden, x, scratch);
}

/* A layer after its attention, in place: x += out · attended, then x += mlp(x). */
static void output_stages(const Model *m, const real *const *part, float *x, const uint32_t *attended, int64_t tokens,
                          const Work *w, int64_t thread, int64_t threads, float *scratch) {
    attention_output_stage(m, part, x, attended, tokens, thread, threads, scratch);
    BARRIER
    mlp_stage(m, part, x, tokens, w, thread, threads, scratch);
    BARRIER
}

static void run_team(const Model *m, const Step *s, const Work *w, int64_t thread, int64_t threads) {
    float *scratch = w->threads + thread * w->thread_floats;
    int64_t begin, end;
    share(blocks_of(s->tokens), thread, threads, &begin, &end);
    for (int64_t b = begin; b < end; b++) embed(m, s, w, b);
    for (int64_t layer = 0; layer < m->layers; layer++) {
        const real *const *part = m->weights + layer * PARTS;
        norm_stage(m, part[ATTN_NORM], w->x, s->tokens, w, thread, threads); /* blocks that this thread wrote or saw */
        BARRIER
        attention_stage(m, s, w, layer, thread, threads, scratch);
        if (layer + 1 < m->layers) output_stages(m, part, w->x, w->attended, s->tokens, w, thread, threads, scratch);
    }
    if (s->samples == 0) return; /* a prompt's middle: its keys and values were all that was wanted */
    share(blocks_of(s->samples), thread, threads, &begin, &end);
    for (int64_t b = begin; b < end; b++) keep_block(m, s, w, b);
    BARRIER
    const real *const *part = m->weights + (m->layers - 1) * PARTS;
    output_stages(m, part, w->kept_x, w->kept_attended, s->samples, w, thread, threads, scratch);
    share(s->samples - s->projected, thread, threads, &begin, &end);
    for (int64_t n = begin; n < end; n++) {
        int64_t at = s->projected + n;
        const float *x = w->kept_x + at / LANES * m->hidden * LANES + at % LANES;
        for (int64_t e = 0; e < m->hidden; e++) s->residual_NE[n * m->hidden + e] = x[e * LANES];
    }
    if (s->projected == 0) return;
    norm_stage(m, m->final_norm, w->kept_x, s->projected, w, thread, threads);
    BARRIER
    share((m->vocab + LANES - 1) / LANES, thread, threads, &begin, &end);
    end = end * LANES < m->vocab ? end * LANES : m->vocab;
    project_vocabulary(m, s, w, begin * LANES, end, scratch);
    if (!s->chooses) return;
    BARRIER
    share(s->projected, thread, threads, &begin, &end);
    for (int64_t n = begin; n < end; n++)
        choose_token(s->logits_NV + n * m->vocab, m->vocab, s->inverse_N[n] == 0.0f, s->inverse_N[n], s->uniform_N[n],
                     (double *)scratch, s->token_N + n, s->logprob_N + n, s->raw_N + n);
}

void gyre_step(const Model *m, const Step *s) {
    Work w;
    lay_out(m, s->tokens, s->sequences, s->samples, s->threads, s->scratch, &w);
    list_tokens(m, s, &w);
    Team team = {0};
    w.team = &team;
#pragma omp parallel num_threads((int)s->threads)
    {
#if defined(_OPENMP)
        run_team(m, s, &w, omp_get_thread_num(), omp_get_num_threads());
#else
        run_team(m, s, &w, 0, 1);
#endif
    }
}
