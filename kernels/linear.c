/* y = x @ w^T + bias in bfloat16 with float32 sums, for CPUs with AVX512-BF16. See linear.py, which calls it.
 *
 * The weight is packed in panels of 32 outputs: one pair of inputs after the other, each for all 32, so that a step
 * loads two registers of weights, which serve every row of a group, and one pair of inputs per row. Sums stay in
 * registers from the first input to the last, and no lane is ever added to another. A panel stays in the second-level
 * cache for all groups of rows; while they use it, the next one is fetched.
 */

#include "bf16.h"

#if defined(__x86_64__) && defined(__GNUC__)

enum {
    PANEL_OUTPUTS = 32,
    STEP_BYTES = PANEL_OUTPUTS * 4, /* what a pair of inputs takes of a panel */
    MAX_GROUP_ROWS = 9,             /* more rows, and their addresses no longer fit in general registers */
    MAX_CHUNK_ROWS = 117,           /* rows that are to stay in the second-level cache beside two panels */
    TASKS_PER_THREAD = 4,
    RUN_AHEAD_BYTES = 8192
};
static const int64_t MIN_PARALLEL_PRODUCTS = 1 << 18; /* about what starting the threads takes */

int linear_bf16_is_supported(void) { return cpu_is_supported(); }

typedef struct {
    uint16_t *y;
    const uint16_t *x, *packed;
    const float *bias; /* or NULL */
    int64_t inputs, outputs;
} Product;

/* One panel for `rows` rows from `row` on: a constant, for the sums to stay in registers. Memory is fetched from
 * `ahead` on, `stride` bytes per step. */
TARGET INLINE void group(const Product *p, int64_t panel, int64_t row, const int rows, const char *ahead,
                         int64_t stride) {
    const int64_t steps = (p->inputs + 1) / 2, whole_steps = p->inputs / 2;
    const uint16_t *w = p->packed + panel * steps * (STEP_BYTES / 2);
    const uint16_t *x = p->x + row * p->inputs;
    __m512 sums[MAX_GROUP_ROWS][2];

    __m512 start[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
    if (p->bias) {
        start[0] = _mm512_loadu_ps(p->bias + panel * PANEL_OUTPUTS);
        start[1] = _mm512_loadu_ps(p->bias + panel * PANEL_OUTPUTS + 16);
    }
#pragma GCC unroll 9
    for (int r = 0; r < rows; r++)
        sums[r][0] = start[0], sums[r][1] = start[1];

    for (int64_t step = 0; step < steps; step++, w += STEP_BYTES / 2, ahead += stride) {
        const __m512bh w0 = (__m512bh)_mm512_loadu_si512(w), w1 = (__m512bh)_mm512_loadu_si512(w + 32);
        /* Into the second-level cache where memory is what the step waits for, else (measured) into the first. */
        if (stride >= 64) {
            _mm_prefetch(ahead, _MM_HINT_T1);
            _mm_prefetch(ahead + 64, _MM_HINT_T1);
        } else {
            _mm_prefetch(ahead, _MM_HINT_T0);
        }
        if (step < whole_steps) {
#pragma GCC unroll 9
            for (int r = 0; r < rows; r++) {
                const __m512bh pair = broadcast(x + r * p->inputs + 2 * step, 4);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, pair);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, pair);
            }
        } else {
#pragma GCC unroll 9
            for (int r = 0; r < rows; r++) {
                const __m512bh single = broadcast(x + r * p->inputs + 2 * step, 2);
                sums[r][0] = _mm512_dpbf16_ps(sums[r][0], w0, single);
                sums[r][1] = _mm512_dpbf16_ps(sums[r][1], w1, single);
            }
        }
    }

    const int64_t left = p->outputs - panel * PANEL_OUTPUTS;
    const uint32_t stored = left >= PANEL_OUTPUTS ? ~0u : (1u << left) - 1;
    uint16_t *y = p->y + row * p->outputs + panel * PANEL_OUTPUTS;
#pragma GCC unroll 9
    for (int r = 0; r < rows; r++, y += p->outputs)
        _mm512_mask_storeu_epi16(y, stored, (__m512i)_mm512_cvtne2ps_pbh(sums[r][1], sums[r][0]));
}

/* One panel for the rows from `row` to `end_row`, in groups of nearly the same size. A single one runs ahead in its own
 * panel, several share the fetching of the next one. */
TARGET static void chunk(const Product *p, int64_t panel, int64_t row, int64_t end_row) {
    const int64_t panel_bytes = (p->inputs + 1) / 2 * STEP_BYTES;
    const int64_t groups = (end_row - row + MAX_GROUP_ROWS - 1) / MAX_GROUP_ROWS;
    const char *ahead = (const char *)p->packed + panel * panel_bytes + (groups > 1 ? panel_bytes : RUN_AHEAD_BYTES);
    for (int64_t left = groups; left > 0; left--, ahead += panel_bytes / groups) {
        const int64_t rows = (end_row - row + left - 1) / left;
        switch (rows) {
#define CASE(n)                                                                                                        \
    case n:                                                                                                            \
        group(p, panel, row, n, ahead, STEP_BYTES / groups);                                                           \
        break;
            CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) CASE(7) CASE(8) CASE(9)
#undef CASE
        }
        row += rows;
    }
}

/* `y` [rows, outputs] from `x` [rows, inputs], both contiguous, and a weight packed by linear.py. `bias` is NULL or
 * float32, padded to whole panels. */
void linear_bf16(uint16_t *y, const uint16_t *x, const uint16_t *packed, const float *bias, int64_t rows,
                 int64_t inputs, int64_t outputs, int num_threads) {
    const Product product = {y, x, packed, bias, inputs, outputs};
    const int64_t panels = (outputs + PANEL_OUTPUTS - 1) / PANEL_OUTPUTS;
    if (rows * inputs * outputs < MIN_PARALLEL_PRODUCTS)
        num_threads = 1;
    /* As many chunks as the cache asks for, and more where panels alone are too few for the threads. */
    const int64_t most_chunks = (rows + MAX_GROUP_ROWS - 1) / MAX_GROUP_ROWS;
    int64_t chunks = (rows + MAX_CHUNK_ROWS - 1) / MAX_CHUNK_ROWS;
    if (num_threads > 1 && chunks * panels < (int64_t)TASKS_PER_THREAD * num_threads)
        chunks = (TASKS_PER_THREAD * num_threads + panels - 1) / panels;
    if (chunks > most_chunks)
        chunks = most_chunks;
#pragma omp parallel for schedule(static) num_threads(num_threads) if (num_threads > 1)
    for (int64_t task = 0; task < chunks * panels; task++) {
        const int64_t index = task / panels;
        chunk(&product, task % panels, index * rows / chunks, (index + 1) * rows / chunks);
    }
}

#else

int linear_bf16_is_supported(void) { return 0; }

#endif
