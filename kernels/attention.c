/* Attention in bfloat16 over a paged cache, for CPUs with AVX512-BF16. See attention.py, which calls it.
 *
 * The queries of all heads that share a KV head are rows of one matrix. A task takes some of them through the keys, a
 * block at a time: the block is brought into panels of 32 (pairs of dimensions for 32 keys; pairs of keys for 32
 * dimensions of the values), and every group of rows meets it while it is in the nearest caches. Scores, the running
 * maximum, sum and output are float32; weights are rounded to bfloat16 before they meet the values. The idea of the
 * running softmax is FlashAttention's (Dao et al., 2022).
 */

#include "bf16.h"

#if defined(__x86_64__) && defined(__GNUC__)

#include <float.h>
#include <math.h>

enum {
    PANEL = 32,
    STEP = PANEL * 2,   /* elements that a pair takes of a panel */
    GROUP_ROWS = 9,     /* more rows, and their addresses no longer fit in general registers */
    BLOCK_KEYS = 128,
    MAX_TASK_ROWS = 144,
    MAX_HEAD_DIM = 256,
    TASKS_PER_THREAD = 3
};
static const int64_t MIN_PARALLEL_PRODUCTS = 1 << 18; /* about what starting the threads takes */

int attention_bf16_is_supported(void) { return cpu_is_supported(); }

/* As attention.py has it. Strides count elements; the last dimension is contiguous everywhere. */
typedef struct {
    uint16_t *output;
    const uint16_t *query, *keys, *values;
    const int64_t *key_slots, *key_counts;
    int64_t query_token_stride, query_head_stride;
    int64_t key_slot_stride, key_head_stride, value_slot_stride, value_head_stride;
    int64_t num_requests, num_queries, num_keys, num_heads, num_kv_heads, head_dim, value_dim;
    int64_t window; /* how many keys are seen, the query's own included */
    float scaling;
    const int64_t *query_ends; /* NULL: no query sees a key after its own */
} Attention;

typedef struct {
    uint16_t queries[MAX_TASK_ROWS * MAX_HEAD_DIM];
    uint16_t keys[BLOCK_KEYS * MAX_HEAD_DIM];
    uint16_t values[BLOCK_KEYS * MAX_HEAD_DIM];
    float sums[MAX_TASK_ROWS * MAX_HEAD_DIM]; /* of the values, weighted */
    float scores[GROUP_ROWS * BLOCK_KEYS];
    uint16_t weights[GROUP_ROWS * BLOCK_KEYS];
    float largest[MAX_TASK_ROWS], total[MAX_TASK_ROWS]; /* score, in powers of two, and sum of weights */
} __attribute__((aligned(64))) Scratch;

INLINE int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Some rows of a request and a KV head: of query `row / group_size`, and of the heads that share the KV head, the one
 * that the remainder says. */
typedef struct {
    const int64_t *key_slots;
    int64_t kv_head, token; /* the request's first one */
    int64_t row, num_rows, group_size;
    int64_t before; /* how many keys the first query has before its own */
    int64_t window;
    const int64_t *query_ends; /* the request's, or NULL */
} Task;

/* Of the keys, those that `row` of the task sees: from `first_key` on and before `end_key`. */
INLINE int64_t own_end(const Task *t, int64_t row) { return t->before + (t->row + row) / t->group_size + 1; }
INLINE int64_t first_key(const Task *t, int64_t row) { return larger(0, own_end(t, row) - t->window); }
INLINE int64_t end_key(const Task *t, int64_t row) {
    return t->query_ends ? t->query_ends[(t->row + row) / t->group_size] : own_end(t, row);
}

/* 16 rows of 16 pairs become 16 rows of the pairs that stood in one column. */
TARGET INLINE void transpose(__m512i rows[16]) {
    __m512i t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        rows[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        rows[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        rows[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        rows[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const __m512i a = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0x88);
        const __m512i b = _mm512_shuffle_i32x4(rows[i], rows[4 + i], 0xdd);
        const __m512i c = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0x88);
        const __m512i d = _mm512_shuffle_i32x4(rows[8 + i], rows[12 + i], 0xdd);
        t[i] = _mm512_shuffle_i32x4(a, c, 0x88);
        t[4 + i] = _mm512_shuffle_i32x4(b, d, 0x88);
        t[8 + i] = _mm512_shuffle_i32x4(a, c, 0xdd);
        t[12 + i] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        rows[i] = t[i];
}

/* `packed` [panels of keys, pairs of dimensions, 32 keys, 2], zero beyond the last key. */
TARGET static void pack_keys(uint16_t *packed, const Attention *a, const Task *t, int64_t begin, int64_t end) {
    const uint16_t *keys = a->keys + t->kv_head * a->key_head_stride;
    const int64_t num_places = (end - begin + PANEL - 1) / PANEL * PANEL;
    for (int64_t place = 0; place < num_places; place += 16) {
        const int64_t key = begin + place;
        uint16_t *to = packed + place / PANEL * (a->head_dim / 2 * STEP) + place % PANEL * 2;
        for (int64_t dim = 0; dim < a->head_dim; dim += 32) {
            __m512i rows[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                rows[i] = key + i < end
                              ? _mm512_loadu_si512(keys + t->key_slots[key + i] * a->key_slot_stride + dim)
                              : _mm512_setzero_si512();
            transpose(rows);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++)
                _mm512_store_si512(to + (dim / 2 + i) * STEP, rows[i]);
        }
    }
}

/* `packed` [panels of dimensions, pairs of keys, 32 dimensions, 2], zero beyond the last key. */
TARGET static void pack_values(uint16_t *packed, const Attention *a, const Task *t, int64_t begin, int64_t end) {
    const uint16_t *values = a->values + t->kv_head * a->value_head_stride;
    uint16_t order[2][32];
    for (int i = 0; i < 64; i++)
        order[i / 32][i % 32] = i / 2 + i % 2 * 32;
    const __m512i first = _mm512_loadu_si512(order[0]), second = _mm512_loadu_si512(order[1]);
    for (int64_t key = begin; key < end; key += 2, packed += STEP) {
        const uint16_t *even = values + t->key_slots[key] * a->value_slot_stride;
        const uint16_t *odd = key + 1 < end ? values + t->key_slots[key + 1] * a->value_slot_stride : NULL;
        for (int64_t dim = 0; dim < a->value_dim; dim += PANEL) {
            const __m512i x = _mm512_loadu_si512(even + dim);
            const __m512i y = odd ? _mm512_loadu_si512(odd + dim) : _mm512_setzero_si512();
            uint16_t *to = packed + dim / PANEL * (BLOCK_KEYS / 2 * STEP);
            _mm512_store_si512(to, _mm512_permutex2var_epi16(x, first, y));
            _mm512_store_si512(to + 32, _mm512_permutex2var_epi16(x, second, y));
        }
    }
}

/* `sums` [rows, 32] of `rows` rows of `x` with a panel, `rows` a constant. They start at `factors` (one per row) times
 * what they were; where that is NULL, at zero. */
TARGET INLINE void multiply(float *sums, int64_t sums_stride, const float *factors, const uint16_t *x, int64_t x_stride,
                            const uint16_t *panel, int64_t steps, const int rows) {
    __m512 s[GROUP_ROWS][2];
#pragma GCC unroll 9
    for (int r = 0; r < rows; r++) {
        s[r][0] = s[r][1] = _mm512_setzero_ps();
        if (factors) {
            const __m512 factor = _mm512_set1_ps(factors[r]);
            s[r][0] = _mm512_mul_ps(_mm512_load_ps(sums + r * sums_stride), factor);
            s[r][1] = _mm512_mul_ps(_mm512_load_ps(sums + r * sums_stride + 16), factor);
        }
    }
    for (int64_t step = 0; step < steps; step++, panel += STEP) {
        const __m512bh p0 = (__m512bh)_mm512_load_si512(panel), p1 = (__m512bh)_mm512_load_si512(panel + 32);
#pragma GCC unroll 9
        for (int r = 0; r < rows; r++) {
            const __m512bh pair = broadcast(x + r * x_stride + 2 * step, 4);
            s[r][0] = _mm512_dpbf16_ps(s[r][0], p0, pair);
            s[r][1] = _mm512_dpbf16_ps(s[r][1], p1, pair);
        }
    }
#pragma GCC unroll 9
    for (int r = 0; r < rows; r++) {
        _mm512_store_ps(sums + r * sums_stride, s[r][0]);
        _mm512_store_ps(sums + r * sums_stride + 16, s[r][1]);
    }
}

TARGET static void multiply_any(float *sums, int64_t sums_stride, const float *factors, const uint16_t *x,
                                int64_t x_stride, const uint16_t *panel, int64_t steps, int64_t rows) {
    switch (rows) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        multiply(sums, sums_stride, factors, x, x_stride, panel, steps, n);                                            \
        break;
        CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
#undef CASE
    }
}

/* 2^x for x <= 0, to a few millionths; 0 where that would be denormal, NaN of NaN. */
TARGET INLINE __m512 power_of_two(__m512 x) {
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = _mm512_sub_ps(x, whole);
    __m512 y = _mm512_set1_ps(1.3333558e-3f);
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(9.6181291e-3f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(5.5504109e-2f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(2.4022651e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(6.9314718e-1f));
    y = _mm512_fmadd_ps(y, rest, _mm512_set1_ps(1.0f));
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.0f), _CMP_NLT_UQ), y, whole);
}

/* Of 16 places, those that are among the first `count`. */
INLINE uint32_t first_places(int64_t count) { return count >= 16 ? 0xffff : count <= 0 ? 0 : (1u << count) - 1; }

/* Weights of one row from its scores of `num_keys` keys, a multiple of 32, of which it sees those from `first` to
 * `end`. The scores are scaled and masked in place: contracted into the subtraction of their maximum, the largest one's
 * scaling would be rounded in another way than the maximum's. Returns the factor that brings earlier sums to the new
 * maximum. */
TARGET INLINE float weigh(uint16_t *weights, float *scores, int64_t num_keys, int64_t first, int64_t end,
                          __m512 scaling, float *largest, float *total) {
    const __m512 nothing = _mm512_set1_ps(-INFINITY);
    __m512 most = nothing;
    for (int64_t key = 0; key < num_keys; key += 16) {
        const __mmask16 seen = first_places(end - key) & ~first_places(first - key);
        const __m512 score = _mm512_mask_mul_ps(nothing, seen, _mm512_load_ps(scores + key), scaling);
        _mm512_store_ps(scores + key, score);
        most = _mm512_max_ps(most, score);
    }
    const float before = *largest, now = fmaxf(before, _mm512_reduce_max_ps(most));
    const __m512 maximum = _mm512_set1_ps(now);
    __m512 sum = _mm512_setzero_ps();
    for (int64_t key = 0; key < num_keys; key += 32) {
        __m512 w[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            w[i] = power_of_two(_mm512_sub_ps(_mm512_load_ps(scores + key + 16 * i), maximum));
            sum = _mm512_add_ps(sum, w[i]);
        }
        _mm512_store_si512(weights + key, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
    }
    const float factor = _mm512_cvtss_f32(power_of_two(_mm512_set1_ps(before - now)));
    *largest = now;
    *total = *total * factor + _mm512_reduce_add_ps(sum);
    return factor;
}

/* What the task's rows add up of the keys from `begin` to `end`, which are packed. */
TARGET static void meet(const Attention *a, const Task *t, Scratch *s, int64_t begin, int64_t end) {
    const __m512 scaling = _mm512_set1_ps(a->scaling * 1.44269504f); /* log2(e) */
    const int64_t groups = (t->num_rows + GROUP_ROWS - 1) / GROUP_ROWS;
    for (int64_t group = 0; group < groups; group++) {
        const int64_t row = group * t->num_rows / groups, rows = (group + 1) * t->num_rows / groups - row;
        const int64_t seen_end = smaller(end, end_key(t, row + rows - 1));
        if (seen_end <= begin || first_key(t, row) >= end)
            continue;
        const int64_t num_keys = (seen_end - begin + PANEL - 1) / PANEL * PANEL;
        for (int64_t key = 0; key < num_keys; key += PANEL)
            multiply_any(s->scores + key, BLOCK_KEYS, NULL, s->queries + row * a->head_dim, a->head_dim,
                         s->keys + key * a->head_dim, a->head_dim / 2, rows);
        float factors[GROUP_ROWS];
        for (int64_t r = 0; r < rows; r++)
            factors[r] = weigh(s->weights + r * BLOCK_KEYS, s->scores + r * BLOCK_KEYS, num_keys,
                               first_key(t, row + r) - begin, smaller(end, end_key(t, row + r)) - begin, scaling,
                               &s->largest[row + r], &s->total[row + r]);
        for (int64_t dim = 0; dim < a->value_dim; dim += PANEL)
            multiply_any(s->sums + row * a->value_dim + dim, a->value_dim, factors, s->weights, BLOCK_KEYS,
                         s->values + dim / PANEL * (BLOCK_KEYS / 2 * STEP), (seen_end - begin + 1) / 2, rows);
    }
}

TARGET static void attend(const Attention *a, const Task *t) {
    Scratch s;
    for (int64_t r = 0; r < t->num_rows; r++) {
        const int64_t token = t->token + (t->row + r) / t->group_size;
        const int64_t head = t->kv_head * t->group_size + (t->row + r) % t->group_size;
        memcpy(s.queries + r * a->head_dim, a->query + token * a->query_token_stride + head * a->query_head_stride,
               a->head_dim * sizeof(uint16_t));
        s.largest[r] = -FLT_MAX; /* finite: what it is subtracted from may be minus infinity */
        s.total[r] = 0;
    }
    memset(s.sums, 0, t->num_rows * a->value_dim * sizeof(float));

    const int64_t last = end_key(t, t->num_rows - 1);
    for (int64_t begin = first_key(t, 0); begin < last; begin += BLOCK_KEYS) {
        const int64_t end = smaller(last, begin + BLOCK_KEYS);
        pack_keys(s.keys, a, t, begin, end);
        pack_values(s.values, a, t, begin, end);
        meet(a, t, &s, begin, end);
    }

    for (int64_t r = 0; r < t->num_rows; r++) {
        const int64_t token = t->token + (t->row + r) / t->group_size;
        const int64_t head = t->kv_head * t->group_size + (t->row + r) % t->group_size;
        uint16_t *output = a->output + (token * a->num_heads + head) * a->value_dim;
        const __m512 total = _mm512_set1_ps(s.total[r]);
        for (int64_t dim = 0; dim < a->value_dim; dim += PANEL) {
            const float *sums = s.sums + r * a->value_dim + dim;
            const __m512 x = _mm512_div_ps(_mm512_load_ps(sums), total);
            const __m512 y = _mm512_div_ps(_mm512_load_ps(sums + 16), total);
            _mm512_storeu_si512(output + dim, (__m512i)_mm512_cvtne2ps_pbh(y, x));
        }
    }
}

void attention_bf16(const Attention *a, int num_threads) {
    const int64_t group_size = a->num_heads / a->num_kv_heads, rows = a->num_queries * group_size;
    const int64_t shares = a->num_requests * a->num_kv_heads;
    if (rows * shares * a->num_keys * (a->head_dim + a->value_dim) < MIN_PARALLEL_PRODUCTS)
        num_threads = 1;
    /* As few parts as the scratch asks for, since each packs the keys anew; more where the threads have too few. */
    int64_t parts = (rows + MAX_TASK_ROWS - 1) / MAX_TASK_ROWS;
    if (num_threads > 1) {
        const int64_t wanted = (TASKS_PER_THREAD * num_threads + shares - 1) / shares;
        parts = larger(parts, smaller(wanted, (rows + GROUP_ROWS - 1) / GROUP_ROWS));
    }
#pragma omp parallel for schedule(dynamic) num_threads(num_threads) if (num_threads > 1)
    for (int64_t index = 0; index < parts * shares; index++) {
        const int64_t part = index / shares, request = index % shares / a->num_kv_heads;
        const Task task = {
            .key_slots = a->key_slots + request * a->num_keys,
            .kv_head = index % a->num_kv_heads,
            .token = request * a->num_queries,
            .row = part * rows / parts,
            .num_rows = (part + 1) * rows / parts - part * rows / parts,
            .group_size = group_size,
            .before = a->key_counts[request] - a->num_queries,
            .window = a->window,
            .query_ends = a->query_ends ? a->query_ends + request * a->num_queries : NULL,
        };
        attend(a, &task);
    }
}

#else

int attention_bf16_is_supported(void) { return 0; }

#endif
